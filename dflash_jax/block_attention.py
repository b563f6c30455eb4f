"""Attention of draft blocks: every slot sees the context below its anchor, and its own block.

Context and block parts are two products merged under one softmax, so the context's keys (a cache in
decoding, a whole sequence in training) are never copied next to the block's.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_jax.attention import masked_softmax
from dflash_jax.block_attention_vjp import chunked_attention
from dflash_jax.kernels.block_attention import api as kernels
from dflash_jax.masks import block_masks

IMPLEMENTATIONS = ("dense", "chunked", "pallas")


def resolve_implementation(name: str, devices: Sequence[jax.Device]) -> str:
    """The implementation to train with on these devices.

    Args:
      name: one of `IMPLEMENTATIONS`, or "auto": "pallas" where it runs, "chunked" elsewhere.

    Raises:
      ValueError: an unknown name, or "pallas" by name where it cannot run, with the reason.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"{name!r} is not one of {('auto', *IMPLEMENTATIONS)}")
    if name not in ("auto", "pallas"):
        return name
    reason = kernels.why_not(devices[0])
    if reason is None:
        return "pallas"
    if name == "pallas":
        raise ValueError(f"'pallas' {reason}")
    return "chunked"


def context_block_attention(
    q_BAGNH: jax.Array,
    context_k_BKSH: jax.Array,
    context_v_BKSH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    anchor_positions_BA: jax.Array,
    *,
    window: int | None,
    causal: bool,
    implementation: str = "dense",
    chunk_anchors: int = 16,
) -> jax.Array:
    """Attention of A blocks a row against shared context and, each, its own slots.

    Args:
      q_BAGNH: queries, normed and rotated at positions `anchor + slot`.
      context_k_BKSH, context_v_BKSH: context slot `s` holds position `s`; visible iff `s < anchor`.
      block_k_BAGKH, block_v_BAGKH: the blocks' own keys (normed, rotated) and values.
      anchor_positions_BA: int32; a block anchored at 0 sees itself only.
      window: sliding window length, or None; see `masks.block_masks`.
      causal: slot `k` sees block slots `<= k` only.
      implementation: "dense", the specification: all scores at once, right for decoding (A = 1).
        "chunked", for training: the same values and gradients within the memory of a few anchors.
        "pallas", for training on NVIDIA GPUs: one kernel, no scores in memory, no masked work.
      chunk_anchors: anchors a row whose scores are alive at once, of "chunked".

    Returns:
      [B, A, G, N, H] in the dtype of `q`. Scale 1/sqrt(H), softmax in float32.

    Raises:
      ValueError: an unknown implementation, one that cannot run here, or no anchor in a chunk.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r} is not one of {IMPLEMENTATIONS}")
    if chunk_anchors < 1:
        raise ValueError(f"chunk_anchors: {chunk_anchors} must be at least 1")
    batch, anchors, block, heads, head_dim = q_BAGNH.shape
    kv_heads = context_k_BKSH.shape[1]
    groups = heads // kv_heads
    q_BAGKRH = (q_BAGNH * head_dim**-0.5).reshape(batch, anchors, block, kv_heads, groups, head_dim)
    keys_values = context_k_BKSH, context_v_BKSH, block_k_BAGKH, block_v_BAGKH
    if implementation == "chunked":
        out = chunked_attention(
            q_BAGKRH,
            *keys_values,
            anchor_positions_BA,
            window=window,
            causal=causal,
            chunk_anchors=min(chunk_anchors, anchors),
        )
    elif implementation == "pallas":
        reason = kernels.why_not(jax.devices()[0])
        if reason is not None:
            raise ValueError(f"implementation: 'pallas' {reason}")
        out = kernels.block_attention(
            q_BAGKRH, *keys_values, anchor_positions_BA, window=window, causal=causal
        )
    else:
        out = _dense(q_BAGKRH, *keys_values, anchor_positions_BA, window=window, causal=causal)
    return out.reshape(q_BAGNH.shape).astype(q_BAGNH.dtype)


def _dense(
    q_BAGKRH: jax.Array,
    context_k_BKSH: jax.Array,
    context_v_BKSH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    anchor_positions_BA: jax.Array,
    *,
    window: int | None,
    causal: bool,
) -> jax.Array:
    """The specification: one softmax over a mask; queries come scaled."""
    slots, block = context_k_BKSH.shape[2], q_BAGKRH.shape[2]
    scores_context = jnp.einsum(
        "bagkrh,bksh->bkrags", q_BAGKRH, context_k_BKSH, preferred_element_type=jnp.float32
    )
    scores_block = jnp.einsum(
        "bagkrh,bajkh->bkragj", q_BAGKRH, block_k_BAGKH, preferred_element_type=jnp.float32
    )
    mask_context, mask_block = block_masks(
        anchor_positions_BA, block, slots, window=window, causal=causal
    )
    mask_block = jnp.broadcast_to(mask_block, (*mask_context.shape[:-1], block))
    mask = jnp.concatenate([mask_context, mask_block], axis=-1)[:, None, None]
    probs = masked_softmax(jnp.concatenate([scores_context, scores_block], axis=-1), mask)
    probs = probs.astype(context_v_BKSH.dtype)
    out = jnp.einsum("bkrags,bksh->bagkrh", probs[..., :slots], context_v_BKSH)
    return out + jnp.einsum("bkragj,bajkh->bagkrh", probs[..., slots:], block_v_BAGKH)
