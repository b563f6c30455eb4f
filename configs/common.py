"""Defaults of every run: the published recipe (arXiv 2602.06036) where it states a value.

`train/settings.py` says what each field means and which values it takes.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def base() -> ConfigDict:
    """A complete config but for `target.path`, `drafter.mask_token_id` and the data."""
    config = ConfigDict()
    config.target = ConfigDict({"path": "", "dtype": "auto", "seed": 0})
    config.drafter = ConfigDict(
        {
            "num_layers": 5,
            "num_taps": 5,
            "target_layer_ids": (),
            "block_size": 16,
            "mask_token_id": -1,
            "warm_start": "",
            "init": "target",
            "features": True,
            "dtype": "auto",
        }
    )
    config.data = ConfigDict(
        {
            "train": (),
            "eval": (),
            "held_out_fraction": 0.01,
            "max_length": 3072,
            "batch_size": 32,
            "enable_thinking": placeholder(bool),
            "on_truncation": "error",
            "loops": "cut",
            "regenerated_by": "",
            "limit": 0,
        }
    )
    config.synthetic = ConfigDict(
        {
            "rows": 0,
            "prompt_length": 8,
            "response_length": 56,
            "temperature": 0.0,
            "seed": 0,
        }
    )
    config.train = ConfigDict(
        {
            "steps": 0,
            "epochs": 6,
            "num_anchors": 512,
            "anchors": "random",
            "accumulate": 1,
            "seed": 0,
            "loss": "decay",
            "gamma": 0.0,  # by block size
            "alpha": 0.5,
            "labels": "data",
            "soft_weight": 0.0,
            "attention": "auto",
            "target_attention": "auto",
            "log_every": 10,
            "eval_every": 1000,
            "checkpoint_every": 500,
            "keep": 2,
        }
    )
    config.optimizer = ConfigDict(
        {
            "name": "adamw",
            "learning_rate": 6e-4,
            "muon_learning_rate": 6e-4,
            "schedule": "cosine",
            "decay_ratio": 0.2,
            "decay_shape": "1-sqrt",
            "warmup_ratio": 0.04,
            "clip_norm": 1.0,
            "weight_decay": 0.0,
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
        }
    )
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})
    config.eval = ConfigDict(
        {"num_rows": 256, "num_prompts": 32, "max_new_tokens": 256, "block_sizes": ()}
    )
    return config
