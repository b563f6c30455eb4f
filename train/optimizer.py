"""AdamW, or Muon for the matrices: schedules, clipping, no decay of norms and biases."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from dflash_jax.sharding import path_name
from train.settings import OptimizerSettings

# End of a kernel's path -> its axes that are [in] and [out] of one matrix of the checkpoint; the
# axes in neither tell matrices apart (layers, key and value, gate and up).
_MATRICES: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    (r"fc/kernel", (1,), (0,)),  # [D, M]
    (r"kv/kernel", (4,), (1, 3)),  # [L, K, 2, H, D]
    (r"attention/q/kernel", (3,), (0, 1, 2)),  # [K, R, H, D]
    (r"attention/out/kernel", (1, 2, 3), (0,)),  # [D, K, R, H]
    (r"mlp/gate_up/kernel", (2,), (1,)),  # [2, F, D]
    (r"mlp/down/kernel", (1,), (0,)),  # [D, F]
)
_TABLE = tuple((re.compile(rf"(?:^|/){end}$"), into, out) for end, into, out in _MATRICES)

# Of Muon's update, as AdamW's usually is, so that both take rates of one size (arXiv 2502.16982).
_UPDATE_RMS = 0.2


def make_schedule(
    settings: OptimizerSettings, num_steps: int, peak: float | None = None
) -> optax.Schedule:
    """Learning rate of step 0, 1, ...: linear to the peak, then down towards 0 (`schedule`).

    The first step already moves (rate peak / warm-up steps); the last one's rate is above 0.

    Args:
      peak: by default `settings.learning_rate`.
    """
    warmup = round(settings.warmup_ratio * num_steps)
    top = settings.learning_rate if peak is None else peak
    cosine = settings.schedule == "cosine"
    falling = num_steps - warmup if cosine else round(settings.decay_ratio * num_steps)
    start = num_steps - falling

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - start) / max(falling, 1), 0, 1)
        if cosine:
            after = 0.5 * top * (1 + jnp.cos(jnp.pi * done))
        elif settings.decay_shape == "linear":
            after = top * (1 - done)
        else:
            after = top * (1 - jnp.sqrt(done))
        return jnp.where(step < warmup, top * (step + 1) / max(warmup, 1), after)

    return rate


def decayed(params: Any) -> Any:
    """Tree of bools: weight decay acts on matrices, not on norm scales and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).rsplit("/", 1)[-1] not in ("scale", "bias"), params
    )


def make_optimizer(settings: OptimizerSettings, num_steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW, or Muon for matrices and AdamW for the rest."""
    adamw = optax.adamw(
        make_schedule(settings, num_steps),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    update = adamw
    if settings.name == "muon":
        matrices = muon(
            make_schedule(settings, num_steps, settings.muon_learning_rate), settings.weight_decay
        )
        update = optax.partition({"muon": matrices, "adamw": adamw}, _labels)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)


def muon(learning_rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) with the update's RMS of "Muon is scalable" (arXiv 2502.16982).

    Nesterov momentum 0.95 is made nearly orthogonal by five Newton-Schulz steps: each matrix of
    the checkpoint for itself, whatever axes its kernel has here.
    """
    return optax.chain(
        scale_by_muon(beta=0.95, nesterov=True, weight_dimension_numbers=dimension_numbers),
        optax.stateless(_scale_to_rms),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def dimension_numbers(kernels: Any) -> Any:
    """Which axes of each kernel are the [in] and the [out] of a matrix; the others are batch axes.

    Raises:
      KeyError: a kernel that is in no table.
    """

    def one(path: Any, _: Any) -> MuonDimensionNumbers:
        found = _matrix_axes(path_name(path))
        if found is None:
            raise KeyError(f"{path_name(path)}: Muon does not know this kernel's axes")
        return found

    return jax.tree_util.tree_map_with_path(one, kernels)


def _matrix_axes(name: str) -> MuonDimensionNumbers | None:
    for pattern, into, out in _TABLE:
        if pattern.search(name):
            return MuonDimensionNumbers(reduction_axis=into, output_axis=out)
    return None


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "adamw" if _matrix_axes(path_name(path)) is None else "muon", params
    )


def _scale_to_rms(updates: Any, params: Any = None) -> Any:
    """An orthogonal [out, in] matrix has an RMS of 1 / sqrt(max(out, in))."""
    del params

    def one(path: Any, update: jax.Array) -> jax.Array:
        axes = _matrix_axes(path_name(path))
        assert axes is not None
        sides = [math.prod(update.shape[i] for i in side) for side in axes]
        return _UPDATE_RMS * math.sqrt(max(sides)) * update

    return jax.tree_util.tree_map_with_path(one, updates)
