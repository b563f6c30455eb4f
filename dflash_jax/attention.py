"""Grouped-query attention over keys and values kept as [B, K, S, H]. Plain arrays, no Flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Up to so many queries, or rows of a product, XLA's CPU backend is faster in forms of its own.
FEW_ROWS = 64
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
    q_BTKGH = q_BTKGH * q_BTKGH.shape[-1] ** -0.5
    mask = mask_BTS[:, None, None]

    def plain(q_BTKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        scores = jnp.einsum(
            "bksh,btkgh->bkgts", k_BKSH, q_BTKGH, preferred_element_type=jnp.float32
        )
        probs = masked_softmax(scores, mask).astype(v_BKSH.dtype)
        return jnp.einsum("bkgts,bksh->btkgh", probs, v_BKSH).astype(q_BTKGH.dtype)

    def few_on_cpu(q_BTKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        return _attend_few(q_BTKGH, k_BKSH, v_BKSH, mask)

    if q_BTKGH.shape[1] > FEW_ROWS:
        out = plain(q_BTKGH, k_BKSH, v_BKSH)
    else:
        out = jax.lax.platform_dependent(q_BTKGH, k_BKSH, v_BKSH, cpu=few_on_cpu, default=plain)
    return out


def _attend_few(
    q_BTKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask: jax.Array
) -> jax.Array:
    """Few queries on XLA's CPU backend, which otherwise turns both products round and transposes
    the whole cache for them at every step (8 queries, 256 slots, 30 layers of SmolLM2: 4 against
    7 ms). One query is multiplied and summed: its products transpose in any order."""
    batch, length, kv_heads, groups, head_dim = q_BTKGH.shape
    q_BKNH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    if length == 1:
        products = q_BKNH[:, :, :, None].astype(jnp.float32) * k_BKSH[:, :, None]
        scores_BKNS = jnp.sum(products, axis=-1)
    else:
        scores_BKSN = jnp.einsum(
            "bksh,bknh->bksn", k_BKSH, q_BKNH, preferred_element_type=jnp.float32
        )
        scores_BKNS = jax.lax.optimization_barrier(scores_BKSN).swapaxes(2, 3)
    scores = scores_BKNS.reshape(batch, kv_heads, groups, length, -1)
    probs = masked_softmax(scores, mask).reshape(scores_BKNS.shape).astype(v_BKSH.dtype)
    if length == 1:
        out = jnp.sum(probs[..., None].astype(jnp.float32) * v_BKSH[:, :, None], axis=3)
    else:
        out = jnp.einsum("bkns,bksh->bknh", probs, v_BKSH)
        out = jax.lax.optimization_barrier(out)
    out = out.reshape(batch, kv_heads, groups, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.astype(q_BKNH.dtype)


def why_not_cudnn(device: jax.Device, dtype: Any, head_dim: int) -> str | None:
    """Why `attend_causal_cudnn` does not run on this device, or None where it does."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"needs an NVIDIA GPU, and the device is {device.platform}"
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"needs bfloat16 or float16, and the dtype is {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return f"needs a head_dim up to 128 and divisible by 8, and it is {head_dim}"
    return None


def attend_causal_cudnn(q_BTKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> jax.Array:
    """`attend` under the causal mask of a sequence on itself (T = S), by cuDNN's flash attention.

    The scores never reach memory. Returns [B, T, K, G, H] in the dtype of `q`.

    Raises:
      ValueError: it cannot run here, with the reason.
    """
    reason = why_not_cudnn(jax.devices()[0], q_BTKGH.dtype, q_BTKGH.shape[-1])
    if reason is not None:
        raise ValueError(f"attention: 'cudnn' {reason}")
    batch, length, kv_heads, groups, head_dim = q_BTKGH.shape
    out = jax.nn.dot_product_attention(
        q_BTKGH.reshape(batch, length, kv_heads * groups, head_dim),
        k_BKSH.swapaxes(1, 2),
        v_BKSH.swapaxes(1, 2),
        is_causal=True,
        implementation="cudnn",
    )
    return out.reshape(q_BTKGH.shape)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of float32 scores; a fully masked row gives zeros, never NaN."""
    scores = jnp.where(mask, scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)
