"""What the slots of a draft block are to predict: the row's tokens, or the target's choices."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def block_labels(
    tokens_BT: jax.Array,
    loss_mask_BT: jax.Array,
    anchors_BA: jax.Array,
    valid_BA: jax.Array,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """What each slot is to predict: the token AT `anchor + k`, no shift.

    Returns:
      labels_BAG: int32, 0 where unsupervised.
      supervised_BAG: False at slot 0, beyond the row, outside the loss mask, at invalid anchors.
    """
    batch, length = tokens_BT.shape
    positions_BAG = anchors_BA[..., None] + jnp.arange(block_size)
    inside = jnp.minimum(positions_BAG, length - 1).reshape(batch, -1)
    tokens, mask = (
        jnp.take_along_axis(x, inside, axis=1).reshape(positions_BAG.shape)
        for x in (tokens_BT, loss_mask_BT.astype(bool))
    )
    supervised = mask & valid_BA[..., None] & (positions_BAG < length)
    supervised &= jnp.arange(block_size) > 0
    return jnp.where(supervised, tokens, 0).astype(jnp.int32), supervised


def greedy_labels(
    tokens_BT: jax.Array,
    predicted_BT: jax.Array,
    loss_mask_BT: jax.Array,
    anchors_BA: jax.Array,
    valid_BA: jax.Array,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """`block_labels` by the target's own argmax: what greedy decoding says after the anchor.

    The target was run over the row's tokens, so its choice for slot k is that of greedy decoding
    from the anchor only while the row's tokens at the slots before k are its choices too. Where
    they first differ (the row was sampled), greedy decoding says the label and takes another path:
    slots beyond are left out. Given what the drafter sees, a slot's label thus depends on no draw;
    only how often it is supervised does. On greedy rows all of this is `block_labels`.

    Args:
      predicted_BT: from `target_predictions`: entry t is the choice for position t + 1.
    """
    choice_BT = jnp.pad(predicted_BT[:, :-1], ((0, 0), (1, 0)))
    own, data = (
        block_labels(tokens, loss_mask_BT, anchors_BA, valid_BA, block_size)
        for tokens in (choice_BT, tokens_BT)
    )
    labels_BAG, supervised_BAG = own
    on_path = supervised_BAG & (labels_BAG == data[0])
    reached = jnp.cumprod(on_path[..., 1:-1], axis=-1).astype(bool)
    supervised_BAG &= jnp.pad(reached, ((0, 0), (0, 0), (2, 0)), constant_values=True)
    return jnp.where(supervised_BAG, labels_BAG, 0), supervised_BAG
