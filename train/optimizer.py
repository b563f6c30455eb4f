"""AdamW on float32 masters: warm-up and cosine, clipping, no decay of norms and biases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflash_jax.sharding import path_name
from train.settings import OptimizerSettings


def make_schedule(settings: OptimizerSettings, num_steps: int) -> optax.Schedule:
    """Learning rate of step 0, 1, ...: linear to the peak, then a cosine towards 0.

    The first step already moves (rate peak / warm-up steps); the last one's rate is above 0.
    """
    warmup = round(settings.warmup_ratio * num_steps)
    peak = settings.learning_rate

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = (step - warmup) / max(num_steps - warmup, 1)
        cosine = 0.5 * peak * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1)))
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), cosine)

    return rate


def decayed(params: Any) -> Any:
    """Tree of bools: weight decay acts on matrices, not on norm scales and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).rsplit("/", 1)[-1] not in ("scale", "bias"), params
    )


def make_optimizer(settings: OptimizerSettings, num_steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW under `make_schedule`."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            make_schedule(settings, num_steps),
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=decayed,
        ),
    )
