#!/usr/bin/env bash
# The built-in model answers held-out prompts with speculative decoding, beside plain decoding, using the drafter that
# comes with the package. With --train it first does what that drafter went through, in small: the model answers
# prompts, a drafter is trained on the answers, and that one is shown too.
#   bash scripts/demo.sh                     about 3 minutes on 2 CPU cores after set-up
#   bash scripts/demo.sh --train [--quick]   about 11 minutes, --quick 4; again: what is there is reused
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick="" train=""
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    --train) train=1 ;;
    *) echo "usage: bash scripts/demo.sh [--train] [--quick]" >&2; exit 2 ;;
  esac
done

bash scripts/setup.sh demo
python=.venv/bin/python
export HF_HUB_OFFLINE=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1 JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax-demo}

if [[ -n $quick ]]; then
  run=runs/demo-quick prompts=48 tokens=32 prompt_tokens=64 held_out=3 shown=1 new=48
  options=(--config.train.steps=10 --config.train.eval_every=10 --config.train.num_anchors=12
    --config.train.checkpoint_every=5 --config.data.max_length=96)
else
  run=runs/demo prompts=160 tokens=96 prompt_tokens=96 held_out=8 shown=2 new=96 options=()
fi
# Prompts of which no drafter here has seen the answers.
split=--held_out_fraction=0.04
target=--target=smollm2-135m-instruct
regenerate=("$python" scripts/regenerate.py $target --prompts=sharegpt --on_truncation=keep $split
  --max_prompt_tokens=$prompt_tokens --max_new_tokens=$tokens --batch_size=16)
answer=("$python" scripts/demo.py $target --answers="$run/held_out.jsonl" --prompts=$held_out --max_new_tokens=$new)

echo "The model answers $held_out held-out ShareGPT prompts by itself"
"${regenerate[@]}" --out="$run/held_out.jsonl" --num_prompts=$held_out --held_out

if [[ -n $train ]]; then
  echo "It answers $prompts more, to train on"
  "${regenerate[@]}" --out="$run/answers.jsonl" --num_prompts=$prompts
  echo "A drafter is trained on the answers"
  $python -m train.main --config=configs/demo.py --workdir="$run/train" --config.data.train="('$run/answers.jsonl',)" \
    --config.data.eval="('$run/held_out.jsonl',)" ${options[@]+"${options[@]}"}
  $python scripts/export_drafter.py --workdir="$run/train" --out="$run/drafter"
  echo "The held-out prompts, answered with the drafter that was just trained"
  "${answer[@]}" --shown=0 --drafter="$run/drafter" --output="$run/demo.json"
fi

echo "The held-out prompts, answered with the drafter that comes with the package"
"${answer[@]}" --shown=$shown --drafter=smollm2-135m-dflash --block_size=8 --output="$run/shipped.json"
