"""Visibility masks, as boolean arrays: True means that a query sees a key.

Worked example, window 3, query at position 4 over slots 0..5 (slot s holds position s):

    causal            1 1 1 1 1 0
    causal + window   0 0 1 1 1 0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_mask(positions_BT: jax.Array, num_slots: int) -> jax.Array:
    """[B, T, S]: slot `s` is visible to a query at position `p` iff `s <= p`.

    Slots beyond a row's length are never at or below a query's position, so stale entries (rejected
    drafts, padding) need no mask of their own.
    """
    return jnp.arange(num_slots) <= positions_BT[..., None]


def within_window(mask_BTS: jax.Array, positions_BT: jax.Array, window: int | None) -> jax.Array:
    """Narrows a mask to the last `window` positions, the query's own included."""
    if window is None:
        return mask_BTS
    return mask_BTS & (jnp.arange(mask_BTS.shape[-1]) > positions_BT[..., None] - window)


def block_masks(
    anchor_positions_BA: jax.Array,
    block_size: int,
    num_slots: int,
    *,
    window: int | None,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Visibility of a draft block: context [B, A, G, S] and inside the block [G, G].

    A block with its anchor at `a` sees the context features of positions `< a` (the anchor's own
    feature does not exist yet) and its own slots. With a sliding window slot `k` sees context
    `>= a + k - (window - 1)`, but its own block without that bound; `causal` limits slot `k` to
    slots `<= k`. (DFlash, arXiv 2602.06036, section 3; windows as the serving engines read them.)
    """
    slot_G = jnp.arange(block_size)
    position_BAG1 = (anchor_positions_BA[..., None] + slot_G)[..., None]
    context = jnp.arange(num_slots) < anchor_positions_BA[..., None, None]
    context = jnp.broadcast_to(context, (*position_BAG1.shape[:-1], num_slots))
    block = jnp.ones((block_size, block_size), bool)
    if window is not None:
        context = context & (jnp.arange(num_slots) > position_BAG1 - window)
    if causal:
        block = block & (slot_G[None, :] <= slot_G[:, None])
    return context, block
