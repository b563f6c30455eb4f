"""Acceptance: how many tokens of a verified block are committed. Plain arrays.

Worked row, block 4: anchor at position 7, drafts d1 d2 d3, the target's own tokens t0..t3 at 8..11.
If d1 == t0 and d2 != t1, one draft is accepted and t0, t1 are committed; t1 is the bonus token and
the next anchor, at position 9.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

RUNNING, STOP, LENGTH = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Attributes:
    count_B: int32, tokens committed this cycle, bonus included, 0 for rows that had finished.
    finish_B: int32, RUNNING, STOP or LENGTH.
    cut_B: bool, the cycle was cut short by a stop id or the budget.
    """

    count_B: jax.Array
    finish_B: jax.Array
    cut_B: jax.Array


def accepted_drafts(drafts_BD: jax.Array, target_BG: jax.Array) -> jax.Array:
    """Length of the longest prefix of drafts that equal the target's tokens, [B] in 0..G-1."""
    agree = drafts_BD == target_BG[:, :-1]
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=-1), axis=-1)


def accept(
    drafts_BD: jax.Array,
    target_BG: jax.Array,
    finish_B: jax.Array,
    remaining_B: jax.Array,
    stop_ids_BN: jax.Array,
    forced_B: jax.Array | None = None,
) -> Acceptance:
    """Decides what a block commits.

    Args:
      drafts_BD: G - 1 drafts.
      target_BG: the target's own token after each of the G verified slots.
      finish_B: state before the cycle; finished rows commit nothing.
      remaining_B: tokens the row may still emit, >= 1 where it is running.
      stop_ids_BN: stop ids, padded with -1.
      forced_B: drafts to accept, right or wrong, in 0..G-1: for cost measurements only. The output
        is then not the target's. None = lossless.
    """
    whole = (accepted_drafts(drafts_BD, target_BG) if forced_B is None else forced_B) + 1
    count, finish = truncate(target_BG, whole, remaining_B, stop_ids_BN)
    running = finish_B == RUNNING
    return Acceptance(
        count_B=jnp.where(running, count, 0),
        finish_B=jnp.where(running, finish, finish_B),
        cut_B=running & (count < whole),
    )


def truncate(
    tokens_BG: jax.Array, count_B: jax.Array, remaining_B: jax.Array, stop_ids_BN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cuts `count` tokens after the first stop id and at the budget: (count_B, finish_B)."""
    is_stop = jnp.any(tokens_BG[..., None] == stop_ids_BN[:, None, :], axis=-1)
    block = tokens_BG.shape[1]
    first_stop = jnp.min(jnp.where(is_stop, jnp.arange(block), block), axis=-1)
    count = jnp.minimum(jnp.minimum(count_B, remaining_B), first_stop + 1)
    finish = jnp.where(first_stop < count, STOP, jnp.where(count >= remaining_B, LENGTH, RUNNING))
    return count.astype(jnp.int32), finish.astype(jnp.int32)
