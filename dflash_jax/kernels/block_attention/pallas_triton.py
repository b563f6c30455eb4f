"""Draft-block attention as Pallas kernels with the Triton lowering (NVIDIA GPUs).

FlashAttention-2 (arXiv 2307.08691) on the two-part softmax of a draft block. The queries of one
block and one key/value head are one tile of G * R rows, which starts from the block's own keys, so
that every row has a finite maximum, and then walks over the context up to its anchor: what lies
behind is never read. Logarithms are to base 2 throughout.

    forward     (anchor, head, row) -> out, log-sum-exp
    backward 1  (anchor, head, row) -> gradients of the queries and of the block's keys and values
    backward 2  (context tile, head, row) -> gradients of the context, over the anchors that see it

Letters beyond the legend: P = G * R query rows, slot-major. Tiles are powers of two, which Triton
asks for: rows, slots and head dimensions are padded by masked loads, not by copies.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dflash_jax.attention import MASKED
from dflash_jax.kernels.block_attention.layout import Shape, Spec, anchor_ranges

LOG2_E = math.log2(math.e)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(
    spec: Spec,
    q_BKAPH: jax.Array,
    context_k_BKSH: jax.Array,
    context_v_BKSH: jax.Array,
    block_k_BKAGH: jax.Array,
    block_v_BKAGH: jax.Array,
    anchor_positions_BA: jax.Array,
) -> jax.Array:
    """Output [B, K, A, P, H] of scaled queries; all floating arrays have one dtype."""
    arrays = (q_BKAPH, context_k_BKSH, context_v_BKSH, block_k_BKAGH, block_v_BKAGH)
    return _forward(spec, *arrays, anchor_positions_BA)[0]


def _forward(
    spec: Spec, q: Any, context_k: Any, context_v: Any, block_k: Any, block_v: Any, anchors: Any
) -> tuple[jax.Array, tuple]:
    """The output, and what the backward pass needs."""
    shape = Shape.of(q, context_k, block_k, spec)
    out, lse = _call(
        _forward_kernel,
        shape,
        spec,
        grid=shape.blocks_grid,
        in_specs=[shape.anchor, shape.rows, shape.context, shape.context, shape.block, shape.block],
        out_specs=[shape.rows, shape.row_numbers],
        out_shape=[_like(q), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
    )(anchors, q, context_k, context_v, block_k, block_v)
    return out, (q, context_k, context_v, block_k, block_v, anchors, out, lse)


def _backward(spec: Spec, residuals: tuple, out_bar: jax.Array) -> tuple:
    q, context_k, context_v, block_k, block_v, anchors, out, lse = residuals
    shape = Shape.of(q, context_k, block_k, spec)
    q_bar, block_k_bar, block_v_bar, delta = _call(
        _query_grad_kernel,
        shape,
        spec,
        grid=shape.blocks_grid,
        in_specs=[
            *[shape.anchor, shape.rows, shape.context, shape.context, shape.block, shape.block],
            *[shape.rows, shape.rows, shape.row_numbers],
        ],
        out_specs=[shape.rows, shape.block, shape.block, shape.row_numbers],
        out_shape=[_like(q), _like(block_k), _like(block_v), _like(lse)],
    )(anchors, q, context_k, context_v, block_k, block_v, out, out_bar, lse)
    tile = spec.tiles.context_grad
    context_k_bar, context_v_bar = _call(
        _context_grad_kernel,
        shape,
        spec,
        grid=(pl.cdiv(shape.slots, tile), shape.kv_heads, shape.batch),
        in_specs=[
            *[shape.tile_number, shape.tile_number, shape.all_anchors],
            *[shape.all_rows, shape.context_tile, shape.context_tile],
            *[shape.all_rows, shape.all_row_numbers, shape.all_row_numbers],
        ],
        out_specs=[shape.context_tile, shape.context_tile],
        out_shape=[_like(context_k), _like(context_v)],
    )(
        *anchor_ranges(anchors, shape.slots, tile, spec.window),
        anchors,
        q,
        context_k,
        context_v,
        out_bar,
        lse,
        delta,
    )
    return q_bar, context_k_bar, context_v_bar, block_k_bar, block_v_bar, None


flash_attention.defvjp(_forward, _backward)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel: Any, shape: Shape, spec: Spec, **options: Any) -> Any:
    tiles = spec.tiles
    num_warps = tiles.num_warps_grad if kernel is _context_grad_kernel else tiles.num_warps
    return pl.pallas_call(
        partial(kernel, shape=shape, spec=spec),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=tiles.num_stages),
        interpret=spec.interpret,
        name=f"block_attention{kernel.__name__.removesuffix('_kernel')}",
        **options,
    )


def _forward_kernel(
    anchor_ref: Any,
    q_ref: Any,
    context_k_ref: Any,
    context_v_ref: Any,
    block_k_ref: Any,
    block_v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    shape: Shape,
    spec: Spec,
) -> None:
    anchor = anchor_ref[...]
    q = _load(q_ref, shape.rows_used, shape.head_dim)
    block_v = _load(block_v_ref, shape.block_size, shape.head_dim)
    scores = _block_scores(q, block_k_ref, shape, spec)
    top = jnp.max(scores, axis=1)
    weights = jnp.exp2(scores - top[:, None])
    total = jnp.sum(weights, axis=1)
    out = _dot(weights.astype(q.dtype), block_v)

    def step(index: jax.Array, carry: tuple) -> tuple:
        out, top, total = carry
        k, v, scores = _context_scores(index, anchor, q, context_k_ref, context_v_ref, shape, spec)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        out = out * shrink[:, None] + _dot(weights.astype(q.dtype), v)
        return out, new_top, total * shrink + jnp.sum(weights, axis=1)

    bounds = _tile_bounds(anchor, shape, spec)
    out, top, total = lax.fori_loop(*bounds, step, (out, top, total))
    _store(out_ref, out / total[:, None], shape.rows_used, shape.head_dim)
    _store(lse_ref, top + jnp.log2(total), shape.rows_used)


def _query_grad_kernel(
    anchor_ref: Any,
    q_ref: Any,
    context_k_ref: Any,
    context_v_ref: Any,
    block_k_ref: Any,
    block_v_ref: Any,
    out_ref: Any,
    out_bar_ref: Any,
    lse_ref: Any,
    q_bar_ref: Any,
    block_k_bar_ref: Any,
    block_v_bar_ref: Any,
    delta_ref: Any,
    *,
    shape: Shape,
    spec: Spec,
) -> None:
    anchor = anchor_ref[...]
    rows, width, slots = shape.rows_used, shape.head_dim, shape.block_size
    q, out_bar = _load(q_ref, rows, width), _load(out_bar_ref, rows, width)
    out = _load(out_ref, rows, width).astype(jnp.float32)
    lse = _load(lse_ref, rows)
    delta = jnp.sum(out * out_bar.astype(jnp.float32), axis=1)
    _store(delta_ref, delta, rows)

    block_k, block_v = _load(block_k_ref, slots, width), _load(block_v_ref, slots, width)
    weights = jnp.exp2(_block_scores(q, block_k_ref, shape, spec) - lse[:, None])
    _store(block_v_bar_ref, _dot(weights.astype(q.dtype), out_bar, (0, 0)), slots, width)
    scores_bar = weights * (_dot(out_bar, block_v, (1, 1)) - delta[:, None])
    scores_bar = scores_bar.astype(q.dtype)
    _store(block_k_bar_ref, _dot(scores_bar, q, (0, 0)), slots, width)

    def step(index: jax.Array, q_bar: jax.Array) -> jax.Array:
        k, v, scores = _context_scores(index, anchor, q, context_k_ref, context_v_ref, shape, spec)
        weights = jnp.exp2(scores - lse[:, None])
        scores_bar = weights * (_dot(out_bar, v, (1, 1)) - delta[:, None])
        return q_bar + _dot(scores_bar.astype(q.dtype), k)

    bounds = _tile_bounds(anchor, shape, spec)
    q_bar = lax.fori_loop(*bounds, step, _dot(scores_bar, block_k))
    _store(q_bar_ref, q_bar, rows, width)


def _context_grad_kernel(
    first_ref: Any,
    last_ref: Any,
    anchors_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_bar_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    k_bar_ref: Any,
    v_bar_ref: Any,
    *,
    shape: Shape,
    spec: Spec,
) -> None:
    """Scores stand transposed, [tile, P], so that both gradients are products from the left."""
    rows, width, tile = shape.rows_used, shape.head_dim, spec.tiles.context_grad
    start = pl.program_id(0) * tile
    used = shape.slots - start  # of the tile; stops at its end
    k = _load(k_ref, used, width, whole=shape.slots % tile == 0)
    v = _load(v_ref, used, width, whole=shape.slots % tile == 0)
    position = start + lax.broadcasted_iota(jnp.int32, (tile, shape.num_rows), 0)
    slot = _slots((tile, shape.num_rows), 1, spec)

    def step(index: jax.Array, carry: tuple) -> tuple:
        k_bar, v_bar = carry
        anchor = anchors_ref[index]
        q, out_bar = (_load(ref.at[index, :, :], rows, width) for ref in (q_ref, out_bar_ref))
        lse, delta = (_load(ref.at[index, :], rows) for ref in (lse_ref, delta_ref))
        visible = position < anchor
        if spec.window is not None:
            visible &= position > anchor + slot - spec.window
        scores = jnp.where(visible, _dot(k, q, (1, 1)) * LOG2_E, MASKED)
        weights = jnp.exp2(scores - lse[None, :])
        v_bar += _dot(weights.astype(q.dtype), out_bar)
        scores_bar = weights * (_dot(v, out_bar, (1, 1)) - delta[None, :])
        return k_bar + _dot(scores_bar.astype(q.dtype), q), v_bar

    zeros = jnp.zeros((tile, shape.width), jnp.float32)
    bars = lax.fori_loop(first_ref[...], last_ref[...], step, (zeros, zeros))
    for ref, bar in zip((k_bar_ref, v_bar_ref), bars, strict=True):
        _store(ref, bar, used, width, whole=shape.slots % tile == 0)


def _block_scores(q: jax.Array, block_k_ref: Any, shape: Shape, spec: Spec) -> jax.Array:
    """[P, slots] against the block's own keys; every row sees at least one."""
    scores = _dot(q, _load(block_k_ref, shape.block_size, shape.head_dim), (1, 1)) * LOG2_E
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    visible = key < shape.block_size
    if spec.causal:
        visible &= key <= _slots(scores.shape, 0, spec)
    return jnp.where(visible, scores, MASKED)


def _context_scores(
    index: jax.Array,
    anchor: jax.Array,
    q: jax.Array,
    k_ref: Any,
    v_ref: Any,
    shape: Shape,
    spec: Spec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values and scores [P, tile] of one tile of the context."""
    start = index * shape.tile
    whole = shape.slots % shape.tile == 0
    k, v = (
        _load(ref.at[pl.ds(start, shape.tile), :], shape.slots - start, shape.head_dim, whole=whole)
        for ref in (k_ref, v_ref)
    )
    scores = _dot(q, k, (1, 1)) * LOG2_E
    position = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    limit = jnp.minimum(anchor, shape.slots)
    visible = position < limit
    if spec.window is not None:
        visible &= position > anchor + _slots(scores.shape, 0, spec) - spec.window
    return k, v, jnp.where(visible, scores, MASKED)


def _tile_bounds(anchor: jax.Array, shape: Shape, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 tile of the context that a block sees anything of."""
    limit = jnp.minimum(anchor, shape.slots)
    end = lax.div(limit + (shape.tile - 1), jnp.int32(shape.tile))
    if spec.window is None:
        return jnp.int32(0), end
    first = jnp.maximum(anchor - (spec.window - 1), 0)
    return lax.div(first, jnp.int32(shape.tile)), end


def _slots(dims: tuple[int, ...], axis: int, spec: Spec) -> jax.Array:
    """The slot that each query row along `axis` belongs to."""
    return lax.div(lax.broadcasted_iota(jnp.int32, dims, axis), jnp.int32(spec.groups))


def _dot(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Product accumulated in float32; float32 inputs are multiplied as such, never as TF32."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dims, precision=exact, preferred_element_type=jnp.float32)


def _mask(dims: tuple[int, ...], used: tuple[Any, ...]) -> jax.Array | None:
    """True inside the true size; None where nothing is padded."""
    mask = None
    for axis, (size, count) in enumerate(zip(dims, used, strict=True)):
        if isinstance(count, int) and count == size:
            continue
        inside = lax.broadcasted_iota(jnp.int32, dims, axis) < count
        mask = inside if mask is None else mask & inside
    return mask


def _load(ref: Any, *used: Any, whole: bool = False) -> jax.Array:
    """A tile, zero beyond its `used` sizes; `whole`: the first axis is known to have no end."""
    if whole:
        used = (ref.shape[0], *used[1:])
    mask = _mask(ref.shape, used)
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def _store(ref: Any, value: jax.Array, *used: Any, whole: bool = False) -> None:
    if whole:
        used = (ref.shape[0], *used[1:])
    plgpu.store(ref, value.astype(ref.dtype), mask=_mask(ref.shape, used))
