"""The run of scripts/demo.sh: a one-layer drafter for SmolLM2-135M-Instruct, trained on a CPU.

    python -m train.main --config=configs/demo.py --workdir=runs/demo/train

Both files of `runs/demo` come from scripts/regenerate.py. Everything is cut down to what two CPU
cores can do in a few minutes: few prompts, short answers, one layer, blocks of 4.

Hardware: 2 CPU cores. Expected: about docs/results/demo_cpu.json.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.base()
    config.target.path = "smollm2-135m-instruct"
    config.drafter.update(mask_token_id=16, num_layers=1, num_taps=3, block_size=4)
    config.data.update(
        train=("runs/demo/answers.jsonl",),
        eval=("runs/demo/held_out.jsonl",),
        max_length=192,
        batch_size=8,
    )
    config.train.update(
        steps=32,
        gamma=4.0,
        num_anchors=40,
        log_every=1,
        eval_every=32,
        checkpoint_every=16,
        keep=1,
    )
    config.optimizer.update(learning_rate=1e-3)
    config.eval.update(num_rows=8, num_prompts=4, max_new_tokens=48)
    return config
