"""A drafter that starts from the target's layers: what is copied, and what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter, init_drafter
from dflash_jax.drafter_init import source_layers
from dflash_jax.errors import LoadError
from dflash_jax.layers import apply
from dflash_jax.target import Target, init_target

TARGETS = {
    "llama": TargetConfig.tiny("llama"),
    "llama, biases": TargetConfig.tiny("llama", attention_bias=True),
    "qwen3": TargetConfig.tiny("qwen3", tie_word_embeddings=True),
}


def make_target(config: TargetConfig) -> Target:
    """Random weights with norms and biases that are not one and zero."""
    rng = np.random.default_rng(0)

    def draw(path: Any, x: jax.Array) -> jax.Array:
        mean, deviation = (1.0, 0.3) if path[-1].key == "scale" else (0.0, 0.15)
        return jnp.asarray(rng.normal(mean, deviation, x.shape), x.dtype)

    target = init_target(config)
    return dataclasses.replace(
        target, params=jax.tree_util.tree_map_with_path(draw, target.params)
    )


def make_drafter(target: Target, **changes: Any) -> Drafter:
    options = {"mask_token_id": 39, "num_layers": 2, "target_layer_ids": (0, 2), "block_size": 4}
    config = DrafterConfig.for_target(target.config, **{**options, **changes})
    return init_drafter(target, config, init="target")
