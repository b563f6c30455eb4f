#!/usr/bin/env bash
# The whole recipe of the drafter that comes with the package: prompts, the target's answers, training, export,
# results. Run again, it goes on where it was stopped.
#   bash scripts/ship_drafter.sh WORKDIR [STAGE...]
# Stages, all by default: prompts answers train export tau speed coupled ablations lookup. Only tau, speed, coupled and
# lookup read the held-out sets. `ablations` takes the greedy answers; `lookup` needs PyTorch.
# Environment: PYTHON (.venv/bin/python); COUNT, prompts a family; TEMPERATURES of the answers, 0 first; VALIDATION, a
# fraction of the prompts; and more flags for a stage: ANSWERS (regenerate), TRAIN (train.main), EVALUATE
# (evaluate_drafter), ABLATE (ablate), LOOKUP (bench_lookup).
set -euo pipefail

[[ $# -ge 1 && $1 != -* ]] || { echo "usage: bash scripts/ship_drafter.sh WORKDIR [STAGE...]" >&2; exit 2; }
mkdir -p "$1"
work=$(cd "$1" && pwd -P)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
all=(prompts answers train export tau speed coupled ablations lookup)
stages=("$@")
((${#stages[@]})) || stages=("${all[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all[*]} " == *" $stage "* ]] || { echo "unknown stage '$stage': ${all[*]}" >&2; exit 2; }
done

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$work/jax-cache}
python=${PYTHON:-.venv/bin/python}
count=${COUNT:-2500}
read -ra temperatures <<<"${TEMPERATURES:-0 0.8 1}"
[[ ${temperatures[0]} == 0 ]] || { echo "TEMPERATURES: '${temperatures[*]}' must begin with 0" >&2; exit 2; }
read -ra answer_flags <<<"${ANSWERS:---batch_size=640}"
read -ra train_flags <<<"${TRAIN:-}"
read -ra evaluate_flags <<<"${EVALUATE:-}"
read -ra lookup_flags <<<"${LOOKUP:-}"
read -ra ablate_flags <<<"${ABLATE:---jobs=4 --set=train.steps=600 --set=drafter.num_layers=3}"
model=smollm2-135m-instruct target=--target=smollm2-135m-instruct
drafter=$work/drafter results=$work/results
split=0.04 validation=${VALIDATION:-0.05} # hashes below the first are the held-out sets, from there to the second for validation

data() { # data FIELD FILE...: the override that names them
  local list
  printf -v list "'%s'," "${@:2}"
  echo "data.$1=($list)"
}
# Sets `files` to what there is to train on, a file a temperature, and `rows` to the overrides of all runs.
answer_files() {
  files=("$work"/answers_t*.npz)
  [[ -f $work/validation.npz ]] || { echo "no answers in $work: run the stage 'answers' first" >&2; exit 1; }
  rows=("data.held_out_fraction=$validation" "$(data eval "$work/validation.npz")")
}

run_prompts() {
  $python scripts/make_prompts.py --out="$work/prompts" --count="$count" --held_out_fraction=$split
}

run_answers() {
  local temperature name prompts
  prompts=$(printf ',%s' "$work"/prompts/*.jsonl)
  [[ -f $work/prompts/coding.jsonl ]] || { echo "no prompts in $work: run the stage 'prompts' first" >&2; exit 1; }
  for temperature in "${temperatures[@]}"; do
    name=answers_t$temperature
    [[ -f $work/$name.npz ]] && continue
    # The prompts by rule, then every user turn of the conversations that is short enough.
    $python scripts/regenerate.py $target --prompts="${prompts#,},sharegpt" --every_user_turn --on_truncation=keep \
      --held_out_fraction=$split --max_prompt_tokens=255 --temperature="$temperature" --out="$work/$name.jsonl" \
      ${answer_flags[@]+"${answer_flags[@]}"}
    if [[ $temperature == 0 ]]; then
      $python scripts/pack_answers.py "$work/$name.jsonl" --out="$work/validation.npz" $target \
        --held_out_fraction=$validation --held_out
    fi
    $python scripts/pack_answers.py "$work/$name.jsonl" --out="$work/$name.npz" $target \
      --held_out_fraction=$validation
  done
}

run_train() {
  answer_files
  $python -m train.main --config=configs/smollm2_135m.py --workdir="$work/train" \
    "--config.$(data train "${files[@]}")" "${rows[@]/#/--config.}" ${train_flags[@]+"${train_flags[@]}"}
}

run_export() {
  $python scripts/export_drafter.py --workdir="$work/train" --out="$drafter" --max_shard_size=15MB
}

evaluate() { # evaluate NAME FLAGS...
  $python scripts/evaluate_drafter.py $target --drafter="$drafter" --held_out_fraction=$split \
    --output="$results/$1.json" "${@:2}" ${evaluate_flags[@]+"${evaluate_flags[@]}"}
}
run_tau() { evaluate evaluation_tau --block_sizes=16 --tau_only; }
run_speed() { evaluate evaluation_speed --num_prompts=16; }
run_coupled() {
  evaluate coupled --sets=humaneval --temperatures=0.5,0.8,1 --draft_policy=argmax,coupled --block_sizes=16 --tau_only
}

run_ablations() {
  answer_files
  $python scripts/ablate.py --config=configs/smollm2_135m.py --plan=configs/ablations.json --workdir="$work/ablations" \
    --output="$results/ablations.json" "--set=$(data train "$work/answers_t0.npz")" "${rows[@]/#/--set=}" \
    ${ablate_flags[@]+"${ablate_flags[@]}"}
}

run_lookup() {
  $python scripts/bench_lookup.py $target --num_prompts=16 --output="$results/transformers_lookup.json" \
    ${lookup_flags[@]+"${lookup_flags[@]}"}
}

mkdir -p "$results"
for stage in "${stages[@]}"; do
  echo "== $stage ($model)"
  start=$SECONDS
  "run_$stage"
  echo "== $stage: $((SECONDS - start)) s"
done
