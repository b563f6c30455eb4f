"""Where the draft blocks of a training row start (DFlash, arXiv 2602.06036, section 3.3).

A fixed number of anchors a row with a validity mask, so that shapes are static. Both samplers take
the same arguments (`uniform_anchors` through `functools.partial(..., block_size=...)`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def candidate_positions(loss_mask_BT: jax.Array) -> jax.Array:
    """[B, T] bool: positions with `loss_mask[p] and loss_mask[p + 1]`; never the last one."""
    mask = loss_mask_BT.astype(bool)
    return mask & jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


def sample_anchors(
    key: jax.Array, sample_ids_B: jax.Array, loss_mask_BT: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Anchors drawn uniformly without replacement from each row's candidate positions.

    A row's anchors depend on (key, sample id) and its loss mask alone: not on its place in the
    batch, the number of devices, or trailing padding.

    Args:
      key: one per epoch, so that anchors are drawn anew in each.
      sample_ids_B: int32, which sample of the data set each row holds.
      loss_mask_BT: bool or 0/1, True on the tokens to learn.
      num_anchors: A.

    Returns:
      anchor_positions_BA: int32, ascending, 0 where invalid.
      valid_BA: bool, False past the number of candidates.
    """
    candidates = candidate_positions(loss_mask_BT)
    length = candidates.shape[1]

    def noise(sample_id: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, sample_id), (length,))

    scores = jnp.where(candidates, jax.vmap(noise)(sample_ids_B), -1.0)
    drawn = min(num_anchors, length)
    top, positions = jax.lax.top_k(scores, drawn)
    return _in_order(positions, top >= 0, num_anchors, length)


def uniform_anchors(
    key: jax.Array,
    sample_ids_B: jax.Array,
    loss_mask_BT: jax.Array,
    num_anchors: int,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Every response divided into consecutive blocks: the paper's ablation, worse than sampling.

    The first block starts at the response's first token. `key` and `sample_ids_B` change nothing.
    Returns what `sample_anchors` does; rows with more than `num_anchors` blocks keep the first.
    """
    candidates = candidate_positions(loss_mask_BT)
    length = candidates.shape[1]
    position_T = jnp.arange(length)
    outside = jnp.where(loss_mask_BT.astype(bool), -1, position_T)
    offset = position_T - jax.lax.cummax(outside, axis=1) - 1
    chosen = candidates & (offset % block_size == 0)
    positions = jnp.broadcast_to(position_T, chosen.shape)
    return _in_order(positions, chosen, num_anchors, length)


def _in_order(
    positions: jax.Array, valid: jax.Array, num_anchors: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """The valid positions ascending, then zeros, cut or filled to `num_anchors`."""
    positions = jnp.sort(jnp.where(valid, positions, length), axis=1)[:, :num_anchors]
    missing = num_anchors - positions.shape[1]
    positions = jnp.pad(positions, ((0, 0), (0, missing)), constant_values=length)
    valid = positions < length
    return jnp.where(valid, positions, 0).astype(jnp.int32), valid
