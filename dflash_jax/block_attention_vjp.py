"""Draft-block attention for training, a few anchors at a time, with its own backward pass.

The scores of all blocks against a whole sequence, [N, A * G, S], do not fit a device: 512 anchors
of 16 slots over 3072 positions are 3 GB a layer for 32 heads. Here a scan holds one chunk of them,
and the backward pass computes them again from the saved output and log-sum-exp, as in
FlashAttention (arXiv 2205.14135, appendix B). Both parts of a row, context and block, share one
softmax: the log-sum-exp and the output in the backward pass are those of the whole row.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from dflash_jax.attention import MASKED
from dflash_jax.masks import block_masks

Chunk = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # q, block_k, block_v, anchor_positions


def chunked_attention(
    q_BAGKRH: jax.Array,
    context_k_BKSH: jax.Array,
    context_v_BKSH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    anchor_positions_BA: jax.Array,
    *,
    window: int | None,
    causal: bool,
    chunk_anchors: int,
) -> jax.Array:
    """`block_attention.context_block_attention` on scaled, grouped queries (R = N // K)."""
    anchors = q_BAGKRH.shape[1]
    chunks = tuple(
        split_anchors(x, chunk_anchors)
        for x in (q_BAGKRH, block_k_BAGKH, block_v_BAGKH, anchor_positions_BA)
    )
    out = _attention(window, causal, context_k_BKSH, context_v_BKSH, chunks)
    return jnp.moveaxis(out, 0, 1).reshape(q_BAGKRH.shape[0], -1, *out.shape[3:])[:, :anchors]


def split_anchors(x: jax.Array, chunk: int) -> jax.Array:
    """[B, A, ...] -> [ceil(A / chunk), B, chunk, ...], the tail filled with zeros.

    Rows stay whole, so that a batch sharded over devices is never moved.
    """
    batch, anchors, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -anchors % chunk), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *rest), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    window: int | None, causal: bool, context_k: jax.Array, context_v: jax.Array, chunks: Chunk
) -> jax.Array:
    return _forward(window, causal, context_k, context_v, chunks)[0]


def _forward(
    window: int | None, causal: bool, context_k: jax.Array, context_v: jax.Array, chunks: Chunk
) -> tuple[jax.Array, tuple]:
    """All chunks -> the output, and what the backward pass needs."""

    def step(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        q, block_k, block_v, anchors = chunk
        context, block = _scores(q, context_k, block_k, anchors, window, causal)
        top = jnp.maximum(jnp.max(context, axis=-1), jnp.max(block, axis=-1))[..., None]
        context, block = _weights(context, top), _weights(block, top)
        total = jnp.sum(context, axis=-1, keepdims=True) + jnp.sum(block, axis=-1, keepdims=True)
        total = jnp.where(total == 0, 1.0, total)
        out = _product("bkrags,bksh->bkragh", context, context_v)
        out += _product("bkragj,bajkh->bkragh", block, block_v)
        out = jnp.einsum("bkragh->bagkrh", out / total)
        return out.astype(q.dtype), (top + jnp.log(total))[..., 0]

    out, log_total = jax.lax.map(step, chunks)
    return out, (context_k, context_v, chunks, out, log_total)


def _backward(
    window: int | None, causal: bool, residuals: tuple, out_bar: jax.Array
) -> tuple[jax.Array, jax.Array, tuple]:
    """Gradients; those of the context, which every chunk adds to, are summed in float32."""
    context_k, context_v, chunks, out, log_total = residuals

    def step(context_bar: tuple, xs: tuple) -> tuple[tuple, tuple]:
        (q, block_k, block_v, anchors), out, log_total, out_bar = xs
        context, block = _scores(q, context_k, block_k, anchors, window, causal)
        context = _weights(context, log_total[..., None])
        block = _weights(block, log_total[..., None])
        delta = jnp.sum(out.astype(jnp.float32) * out_bar.astype(jnp.float32), axis=-1)
        delta = jnp.einsum("bagkr->bkrag", delta)[..., None]
        context_v_bar = _product("bkrags,bagkrh->bksh", context, out_bar)
        block_v_bar = _product("bkragj,bagkrh->bajkh", block, out_bar)
        context *= _product("bagkrh,bksh->bkrags", out_bar, context_v) - delta
        block *= _product("bagkrh,bajkh->bkragj", out_bar, block_v) - delta
        q_bar = _product("bkrags,bksh->bagkrh", context, context_k)
        q_bar += _product("bkragj,bajkh->bagkrh", block, block_k)
        context_k_bar = _product("bkrags,bagkrh->bksh", context, q)
        block_k_bar = _product("bkragj,bagkrh->bajkh", block, q)
        context_bar = (context_bar[0] + context_k_bar, context_bar[1] + context_v_bar)
        return context_bar, (
            q_bar.astype(q.dtype),
            block_k_bar.astype(block_k.dtype),
            block_v_bar.astype(block_v.dtype),
        )

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (context_k, context_v))
    (k_bar, v_bar), bars = jax.lax.scan(step, start, (chunks, out, log_total, out_bar))
    return k_bar.astype(context_k.dtype), v_bar.astype(context_v.dtype), (*bars, None)


_attention.defvjp(_forward, _backward)


def _scores(
    q: jax.Array,
    context_k: jax.Array,
    block_k: jax.Array,
    anchors: jax.Array,
    window: int | None,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Scores of a chunk, float32 [B, K, R, A, G, S] and [B, K, R, A, G, G]; MASKED if unseen."""
    mask_context, mask_block = block_masks(
        anchors, q.shape[2], context_k.shape[2], window=window, causal=causal
    )
    context = _product("bagkrh,bksh->bkrags", q, context_k)
    block = _product("bagkrh,bajkh->bkragj", q, block_k)
    return (
        jnp.where(mask_context[:, None, None], context, MASKED),
        jnp.where(mask_block, block, MASKED),
    )


def _weights(scores: jax.Array, shift: jax.Array) -> jax.Array:
    """exp(scores - shift), zero where masked even if the whole row is."""
    return jnp.where(scores == MASKED, 0.0, jnp.exp(scores - shift))


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum in the narrower input dtype, accumulated in float32."""
    dtype = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    return jnp.einsum(spec, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)
