#!/usr/bin/env bash
# The main job on the built-in model: the target answers prompts, a drafter is trained on the answers, and the target
# then answers held-out prompts with speculative decoding, beside plain decoding.
#   bash scripts/demo.sh [--quick]       about 11 minutes on 2 CPU cores after set-up; again: what is there is reused
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=""
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    *) echo "usage: bash scripts/demo.sh [--quick]" >&2; exit 2 ;;
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
# Prompts of which no drafter here has seen the answers, the shipped one neither.
split=--held_out_fraction=0.03
target=--target=smollm2-135m-instruct
regenerate=("$python" scripts/regenerate.py $target --prompts=sharegpt --on_truncation=keep $split
  --max_prompt_tokens=$prompt_tokens --max_new_tokens=$tokens --batch_size=16)
answer=("$python" scripts/demo.py $target --answers="$run/held_out.jsonl" --shown=$shown --prompts=$held_out
  --max_new_tokens=$new)

echo "1. The target answers $prompts ShareGPT prompts, and $held_out more that are held out"
"${regenerate[@]}" --out="$run/answers.jsonl" --num_prompts=$prompts
"${regenerate[@]}" --out="$run/held_out.jsonl" --num_prompts=$held_out --held_out

echo "2. A drafter is trained on the answers"
$python -m train.main --config=configs/demo.py --workdir="$run/train" --config.data.train="('$run/answers.jsonl',)" \
  --config.data.eval="('$run/held_out.jsonl',)" ${options[@]+"${options[@]}"}
$python scripts/export_drafter.py --workdir="$run/train" --out="$run/drafter"

echo "3. Held-out prompts, answered with the drafter that was just trained"
"${answer[@]}" --drafter="$run/drafter" --output="$run/demo.json"

echo "4. The same prompts with the drafter that comes with the package, trained the same way for longer"
"${answer[@]}" --shown=0 --drafter=smollm2-135m-dflash --block_size=8 --output="$run/shipped.json"
