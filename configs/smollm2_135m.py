"""The drafter that comes with the package, for SmolLM2-135M-Instruct.

    bash scripts/ship_drafter.sh runs/smollm2_135m

does it all: prompts, the target's answers to them (greedy, at temperatures 0.8 and 1), training
with this config, export, results. Training alone:

    python -m train.main --config=configs/smollm2_135m.py --workdir=runs/smollm2_135m/train \
        --config.data.train="('answers_t0.npz', ...)" --config.data.held_out_fraction=0.05

Prompts whose hash is below 0.04 are the held-out sets (train/heldout.py) and never answered for
training; those from 0.04 to 0.05 are for validation. Id 16 (`<empty_output>`) is the mask.

Hardware: one H200, 65 ms a step, 10 minutes. Expected: acceptance length 3.7 on HumanEval, 4.0 on
ShareGPT, loops left out; docs/results/smollm2_135m_dflash_training.json, evaluation_tau_h200.json.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.base()
    config.target.path = "smollm2-135m-instruct"
    config.drafter.mask_token_id = 16
    config.data.update(
        train=("data/smollm2_135m.jsonl",), max_length=768, batch_size=32, held_out_fraction=0.04
    )
    config.train.update(steps=8600, epochs=0, num_anchors=128)
    config.optimizer.update(
        name="muon", muon_learning_rate=2e-3, learning_rate=1e-3, schedule="wsd"
    )
    return config
