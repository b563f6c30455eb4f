"""The chunked training attention against the dense mask, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.block_attention import context_block_attention

NAMES = ("q", "context_k", "context_v", "block_k", "block_v")
MASKS = [
    pytest.param(None, False, id="full"),
    pytest.param(None, True, id="causal"),
    pytest.param(5, True, id="window-causal"),
    pytest.param(3, False, id="window-bidirectional"),
    pytest.param(1, True, id="window-1"),
]


def inputs(
    seed, batch, anchors, block, kv_heads, groups, head_dim, slots, dtype=jnp.float32
) -> tuple[Any, Any, Any]:
    """Random arrays, anchors from 0 to beyond the context, and a cotangent."""
    rng = np.random.default_rng(seed)
    q_shape = (batch, anchors, block, kv_heads * groups, head_dim)
    shapes = (
        q_shape,
        (batch, kv_heads, slots, head_dim),
        (batch, kv_heads, slots, head_dim),
        (batch, anchors, block, kv_heads, head_dim),
        (batch, anchors, block, kv_heads, head_dim),
    )
    arrays = tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    positions = jnp.asarray(rng.integers(0, slots + 3, (batch, anchors)), jnp.int32)
    return arrays, positions, jnp.asarray(rng.normal(size=q_shape), dtype)


def attend(arrays, positions, **options) -> jax.Array:
    q, context_k, context_v, block_k, block_v = arrays
    return context_block_attention(q, context_k, context_v, block_k, block_v, positions, **options)


def forward_and_gradients(arrays, positions, cotangent, **options):
    @jax.jit
    def run(arrays):
        out, vjp = jax.vjp(lambda *x: attend(x, positions, **options), *arrays)
        return out, vjp(cotangent)

    return run(arrays)


def assert_equal(arrays, positions, cotangent, chunk, window, causal):
    options = {"window": window, "causal": causal}
    want, want_bars = forward_and_gradients(arrays, positions, cotangent, **options)
    got, got_bars = forward_and_gradients(
        arrays, positions, cotangent, implementation="chunked", chunk_anchors=chunk, **options
    )
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-5)
    for name, a, b in zip(NAMES, got_bars, want_bars, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_equals_dense(window, causal):
    assert_equal(*inputs(0, 2, 8, 4, 2, 2, 8, 13), 3, window, causal)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_any_chunk(chunk):
    """Chunks of one anchor, that divide the 8 anchors, and longer than there are anchors."""
    assert_equal(*inputs(0, 2, 8, 4, 2, 2, 8, 13), chunk, None, False)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    shape=st.tuples(
        st.integers(1, 3),
        st.integers(1, 7),
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([2, 4, 6]),
        st.integers(1, 12),
    ),
    chunk=st.integers(1, 8),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
)
def test_equals_dense_any_shape(seed, shape, chunk, window, causal):
    assert_equal(*inputs(seed, *shape), chunk, window, causal)


@pytest.mark.parametrize("position", [0, 13, 500])
def test_anchor_at_the_edges(position):
    """Anchored at 0 a block sees itself only; beyond the context it sees all of it."""
    arrays, positions, cotangent = inputs(1, 1, 3, 4, 1, 2, 8, 13)
    positions = jnp.full_like(positions, position)
    assert_equal(arrays, positions, cotangent, 2, None, False)
    _, bars = forward_and_gradients(
        arrays, positions, cotangent, window=None, causal=False, implementation="chunked"
    )
    assert bool(jnp.any(bars[1] != 0)) == (position > 0)


def test_large_scores_stay_finite():
    """The softmax shifts by the row's largest score, whichever part it lies in."""
    arrays, positions, cotangent = inputs(2, 1, 4, 4, 1, 1, 8, 9)
    q, context_k, context_v, block_k, block_v = arrays
    for scaled in (
        (q * 100, context_k * 10, context_v, block_k, block_v),
        (q * 100, context_k, context_v, block_k * 10, block_v),
    ):
        (want, want_bars), (got, got_bars) = (
            forward_and_gradients(
                scaled, positions, cotangent, window=None, causal=False, implementation=name
            )
            for name in ("dense", "chunked")
        )
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(got_bars[2], want_bars[2], atol=1e-5, rtol=1e-5)
        # Saturated: the gradients of queries and keys are rounding noise around zero.
        assert all(np.isfinite(bar).all() for bar in got_bars)


def test_bfloat16_accumulates_in_float32():
    """bfloat16 inputs: output and gradients lie within bfloat16 rounding of the float32 result.

    Many anchors add to the same context slot; a bfloat16 sum over chunks would drift by per cents.
    """
    arrays, positions, cotangent = inputs(3, 1, 64, 4, 1, 2, 16, 8, jnp.bfloat16)
    positions = jnp.full_like(positions, 8)
    wide = [x.astype(jnp.float32) for x in (*arrays, cotangent)]
    options = {"window": None, "causal": False}
    want = forward_and_gradients(wide[:-1], positions, wide[-1], **options)
    got = forward_and_gradients(
        arrays, positions, cotangent, implementation="chunked", chunk_anchors=1, **options
    )
    for name, a, b in zip(("out", *NAMES), *map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 6e-3, (name, error)


def test_memory_is_that_of_a_chunk():
    """The compiled forward and backward pass never hold the scores of all anchors."""
    anchors, block, heads, slots = 256, 4, 2, 256
    arrays, positions, cotangent = inputs(4, 1, anchors, block, 1, heads, 4, slots)

    def temporary_bytes(implementation):
        @jax.jit
        def run(arrays):
            return jax.vjp(
                lambda *x: attend(
                    x, positions, window=None, causal=False, implementation=implementation
                ),
                *arrays,
            )[1](cotangent)

        return run.lower(arrays).compile().memory_analysis().temp_size_in_bytes

    all_scores = 4 * anchors * block * heads * slots
    assert temporary_bytes("chunked") < all_scores / 2
    assert temporary_bytes("dense") > all_scores


def test_unknown_implementation_is_refused():
    arrays, positions, _ = inputs(0, 1, 2, 2, 1, 1, 2, 3)
    with pytest.raises(ValueError, match=r"implementation: 'flash'.*dense.*chunked"):
        attend(arrays, positions, window=None, causal=False, implementation="flash")
    with pytest.raises(ValueError, match="chunk_anchors: 0"):
        attend(
            arrays,
            positions,
            window=None,
            causal=False,
            implementation="chunked",
            chunk_anchors=0,
        )
