#!/usr/bin/env bash
# Every check: lint, format, types, tests. Exits non-zero if any of them fails.
#   bash scripts/test.sh [--all] [pytest arguments]
# --all: the slow tests too, and the golden tests on Python 3.12 with the newest jax, where that Python exists.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
all=""
arguments=()
for argument in "$@"; do
  if [[ $argument == --all ]]; then all=--all; else arguments+=("$argument"); fi
done

bash scripts/setup.sh test || exit 1
bin=.venv/bin
cores=$("$bin/python" -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
failed=()
stage() { # stage NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@"; then echo "== $name: ok, $((SECONDS - start)) s"; else failed+=("$name"); echo "== $name: FAILED"; fi
}

# Prints a Python 3.12 that really runs (a pyenv shim may exist and still refuse) and can make environments.
find_python312() {
  local candidates candidate
  candidates=$(type -aP python3.12)
  if command -v pyenv >/dev/null; then
    candidates+=$'\n'$(ls -d "$(pyenv root)"/versions/3.12*/bin/python3.12 2>/dev/null)
  fi
  for candidate in $candidates; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

golden_on_newest() {
  local files
  VENV=.venv312 PYTHON=$1 bash scripts/setup.sh test || return 1
  .venv312/bin/python -c 'import flax, jax, sys
print("Python", sys.version.split()[0], "jax", jax.__version__, "flax", flax.__version__)'
  # Only the files that hold golden tests: collecting the others would take longer than the tests.
  mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.golden' tests)
  .venv312/bin/python -m pytest -q -m golden -n "$cores" --dist worksteal ${files[@]+"${files[@]}"}
}

stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy"
if [[ -n $all ]]; then
  if "$bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "== golden on Python 3.12: not run apart, .venv is that new already"
  elif python312=$(find_python312); then
    stage "golden on Python 3.12" golden_on_newest "$python312"
  else
    echo "== golden on Python 3.12: not run, no working python3.12 here"
  fi
fi
stage "pytest" "$bin/python" scripts/measure.py "$bin/python" -m pytest $all -n "$cores" --dist worksteal \
  --durations=15 --durations-min=1 ${arguments[@]+"${arguments[@]}"}

if ((${#failed[@]})); then
  echo "FAILED: $(IFS=,; echo "${failed[*]}")"
  exit 1
fi
echo "all checks passed"
