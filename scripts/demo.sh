#!/usr/bin/env bash
# The main job on the built-in model: the target answers prompts, a drafter is trained on the answers, and the target
# then answers held-out prompts with speculative decoding, beside plain decoding.
#   bash scripts/demo.sh [--quick]       about 8 minutes on 2 CPU cores (--quick: 2); again: what is there is reused
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
export HF_HUB_OFFLINE=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1 JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_COMPILATION_CACHE_MAX_SIZE=2147483648 # a limit also turns on the lock for parallel runs

if [[ -n $quick ]]; then
  run=runs/demo-quick prompts=48 tokens=32 prompt_tokens=64 held_out=0.15 shown=1 timed=3 new=48
  options=(--config.train.steps=10 --config.train.eval_every=10 --config.train.num_anchors=12
    --config.train.checkpoint_every=5 --config.data.max_length=96)
else
  run=runs/demo prompts=192 tokens=96 prompt_tokens=96 held_out=0.08 shown=2 timed=8 new=96 options=()
fi

echo "1. The target answers $prompts ShareGPT prompts"
$python scripts/regenerate.py --target=smollm2-135m-instruct --prompts=sharegpt --on_truncation=keep \
  --out="$run/answers.jsonl" --num_prompts=$prompts --max_prompt_tokens=$prompt_tokens --max_new_tokens=$tokens \
  --held_out_fraction=0 --batch_size=16

echo "2. A drafter is trained on the answers"
$python -m train.main --config=configs/demo.py --workdir="$run/train" \
  --config.data.train="('$run/answers.jsonl',)" --config.data.held_out_fraction=$held_out ${options[@]+"${options[@]}"}
$python scripts/export_drafter.py --workdir="$run/train" --out="$run/drafter"

echo "3. Held-out prompts, answered speculatively"
$python scripts/demo.py --target=smollm2-135m-instruct --drafter="$run/drafter" --answers="$run/answers.jsonl" \
  --held_out_fraction=$held_out --shown=$shown --prompts=$timed --max_new_tokens=$new --output="$run/demo.json"
