"""Grouped-query attention over keys and values kept as [B, K, S, H]. Plain arrays, no Flax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Large and finite: a row without any visible key stays finite and is then zeroed.
MASKED = -1e30


def attend(
    q_BTKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Softmax attention of grouped queries, scaled by 1/sqrt(H), softmax in float32.

    Args:
      q_BTKGH: queries; G here is the number of query heads per key/value head.
      k_BKSH, v_BKSH: keys (normed, rotated) and values, a whole cache or the sequence itself.
      mask_BTS: True = visible; [B, T, S] or broadcastable to it.

    Returns:
      [B, T, K, G, H] in the dtype of `q`; zeros where a query sees nothing.
    """
    scale = q_BTKGH.shape[-1] ** -0.5
    # Keys first: with the queries first, XLA's CPU backend copies the keys of a one-token pass to
    # another layout at every step.
    scores = jnp.einsum(
        "bksh,btkgh->bkgts", k_BKSH, q_BTKGH * scale, preferred_element_type=jnp.float32
    )
    mask = mask_BTS[:, None, None]
    probs = masked_softmax(scores, mask)
    return jnp.einsum("bkgts,bksh->btkgh", probs.astype(v_BKSH.dtype), v_BKSH).astype(q_BTKGH.dtype)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of float32 scores; a fully masked row gives zeros, never NaN."""
    scores = jnp.where(mask, scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)
