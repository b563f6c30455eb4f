"""The Pallas kernels of the draft-block attention, run in plain JAX, against the dense mask.

What only a GPU can tell, the compiled kernels' numbers and speed, is `scripts/check_kernels.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.block_attention import context_block_attention, resolve_implementation
from dflash_jax.kernels.block_attention.api import block_attention
from dflash_jax.kernels.block_attention.layout import Tiles, anchor_ranges
from dflash_jax.sharding import make_mesh
from tests.gpu_rigs import Device, lowering_for_cuda

NAMES = ("q", "context_k", "context_v", "block_k", "block_v")
TILES = Tiles(context=16, context_grad=16)
SIZES = (2, 5, 4, 2, 3, 16, 37)
MASKS = [
    pytest.param(None, False, id="full"),
    pytest.param(20, True, id="window-causal"),
    pytest.param(1, False, id="window-1"),
]


def shapes(batch, anchors, block, kv_heads, groups, head_dim, slots) -> tuple[Any, ...]:
    context = (batch, kv_heads, slots, head_dim)
    own = (batch, anchors, block, kv_heads, head_dim)
    return (batch, anchors, block, kv_heads, groups, head_dim), context, context, own, own


def inputs(seed, *sizes, dtype=jnp.float32) -> tuple[Any, Any, Any]:
    """Random arrays, unsorted anchors from 0 to beyond the context, and a cotangent."""
    rng = np.random.default_rng(seed)
    arrays = tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes(*sizes))
    positions = jnp.asarray(rng.integers(0, sizes[-1] + 3, (sizes[0], sizes[1])), jnp.int32)
    return arrays, positions, jnp.asarray(rng.normal(size=arrays[0].shape), dtype)


def dense(q, *rest, **options) -> jax.Array:
    """The specification; it scales the queries itself."""
    *lead, heads, groups, head_dim = q.shape
    q = (q * head_dim**0.5).reshape(*lead, heads * groups, head_dim)
    out = context_block_attention(q, *rest, **options)
    return out.reshape(*lead, heads, groups, head_dim)


def kernel(*arrays, **options) -> jax.Array:
    return block_attention(*arrays, interpret=True, tiles=TILES, **options)


# Compiling the interpreted kernels is what takes the time here; they run once.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@partial(jax.jit, static_argnums=(0, 4, 5), compiler_options=FAST_COMPILE)
def forward_and_gradients(attend, arrays, positions, cotangent, window, causal):
    def of(*arrays):
        return attend(*arrays, positions, window=window, causal=causal)

    out, vjp = jax.vjp(of, *arrays)
    return out, *vjp(cotangent)


def assert_equal(arrays, positions, cotangent, window, causal):
    """Of numbers of order 1 (sums over up to 40 keys or rows): 1e-5, the rounding of float32."""
    run = (arrays, positions, cotangent, window, causal)
    want, got = (forward_and_gradients(attend, *run) for attend in (dense, kernel))
    for name, a, b in zip(("out", *NAMES), got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_equals_dense(window, causal):
    """Three query heads a key/value head, and nothing that divides a tile."""
    assert_equal(*inputs(0, *SIZES), window, causal)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    sizes=st.tuples(
        st.integers(1, 2),
        st.integers(1, 6),
        st.sampled_from([2, 5, 16]),
        st.integers(1, 2),
        st.integers(1, 5),
        st.sampled_from([6, 16, 24]),
        st.integers(1, 40),
    ),
    window=st.none() | st.integers(1, 30),
    causal=st.booleans(),
)
def test_equals_dense_any_shape(seed, sizes, window, causal):
    assert_equal(*inputs(seed, *sizes), window, causal)


@pytest.mark.parametrize("position", [0, 1, 16, 37, 500])
def test_anchors_at_the_edges(position):
    """Anchored at 0 a block sees itself only, and the context gets no gradient."""
    arrays, positions, cotangent = inputs(1, *SIZES)
    positions = jnp.full_like(positions, position)
    assert_equal(arrays, positions, cotangent, None, False)
    bars = forward_and_gradients(kernel, arrays, positions, cotangent, None, False)
    assert bool(jnp.any(bars[2] != 0)) == (position > 0)
    assert not jnp.any(bars[2][:, :, position:])


def test_large_scores_stay_finite():
    """The softmax shifts by the row's largest score, whichever part it lies in."""
    arrays, positions, cotangent = inputs(2, *SIZES)
    for part in (1, 3):
        scaled = [x * (100 if i == 0 else 10 if i == part else 1) for i, x in enumerate(arrays)]
        run = (scaled, positions, cotangent, None, False)
        want, got = (forward_and_gradients(attend, *run) for attend in (dense, kernel))
        np.testing.assert_allclose(got[0], want[0], atol=1e-5, rtol=1e-5)
        assert all(np.isfinite(x).all() for x in got)


def test_bfloat16_sums_in_float32():
    """As near to the float32 result as bfloat16 inputs and outputs let it be."""
    arrays, positions, cotangent = inputs(3, 1, 24, 4, 1, 2, 16, 32, dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (*arrays, cotangent)]
    want = forward_and_gradients(dense, wide[:-1], positions, wide[-1], None, False)
    got = forward_and_gradients(kernel, arrays, positions, cotangent, None, False)
    for name, a, b in zip(("out", *NAMES), got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 6e-3, (name, error)


def test_ranges_hold_every_anchor_that_sees_a_tile():
    rng = np.random.default_rng(0)
    anchors = rng.integers(0, 50, (3, 9))
    for window in (None, 2, 7, 30):
        first, last = anchor_ranges(jnp.asarray(anchors, jnp.int32), 40, 16, window)
        for row in range(3):
            for tile in range(3):
                seen = [
                    i
                    for i, anchor in enumerate(anchors[row])
                    for p in range(16 * tile, 16 * tile + 16)
                    if p < anchor and (window is None or p > anchor - window)
                ]
                want = (min(seen), max(seen) + 1) if seen else (0, 0)
                assert (int(first[row, tile]), int(last[row, tile])) == want


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2)])
def test_each_device_takes_its_rows_and_heads(sizes):
    """Under a mesh the result is the same, and stays split like the inputs."""
    arrays, positions, cotangent = inputs(0, 8, 2, 2, 2, 1, 16, 17)
    run = (arrays, positions, cotangent, None, False)
    want = forward_and_gradients(dense, *run)
    mesh = make_mesh(*sizes)
    spec = jax.sharding.PartitionSpec(("data", "fsdp"), None, None, "tensor")
    with jax.set_mesh(mesh):
        got = forward_and_gradients(kernel, *run)
    for name, a, b in zip(("out", *NAMES), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)
    assert got[0].sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        pytest.param((32, 128, 16, 3, 3, 64, 768), None, id="SmolLM2-135M"),
        pytest.param((1, 512, 16, 8, 4, 128, 3072), None, id="Qwen3-8B"),
        pytest.param((2, 5, 7, 2, 3, 48, 100), 20, id="odd"),
    ],
)
def test_lowers_for_cuda(dtype, sizes, window):
    """Forward and backward become Triton modules: shapes, loads and operations that it has."""
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes(*sizes)]
    positions = jax.ShapeDtypeStruct(sizes[:2], jnp.int32)

    def run(arrays, positions, cotangent):
        def of(*floating):
            arrays = [*floating, positions]
            return block_attention(*arrays, window=window, causal=bool(window))

        return jax.vjp(of, *arrays)[1](cotangent)

    with lowering_for_cuda():
        traced = jax.jit(run).trace(arrays, positions, arrays[0])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("forward", "query_grad", "context_grad"):
        assert f"block_attention_{name}" in text


def test_refusals():
    arrays, positions, _ = inputs(0, 1, 2, 2, 1, 1, 16, 5)
    q = arrays[0].reshape(1, 2, 2, 1, 16)
    rest = [*arrays[1:], positions]
    options: Any = {"window": None, "causal": False}
    with pytest.raises(ValueError, match=r"implementation: 'pallas' needs an NVIDIA GPU.*is cpu"):
        context_block_attention(q, *rest, implementation="pallas", **options)
    with pytest.raises(ValueError, match=r"dtypes.*'bfloat16', 'float32'"):
        block_attention(arrays[0].astype(jnp.bfloat16), *rest, interpret=True, **options)
    with pytest.raises(ValueError, match="is empty"):
        block_attention(arrays[0][:, :0], *rest, interpret=True, **options)
    with pytest.raises(ValueError, match="context: 48 is not a power of two"):
        Tiles(context=48)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("gpu", "PJRT C API\ncuda 13000", "9.0"), "pallas"),
        (Device("gpu", "cuda 12080", "10.3"), "pallas"),
        (Device("gpu", "cuda 12080", "7.5"), "chunked"),
        (Device("gpu", "rocm 60300", "gfx942"), "chunked"),
        (Device("tpu", "", ""), "chunked"),
    ],
)
def test_auto_picks_what_runs(device, name):
    assert resolve_implementation("auto", [device]) == name
    assert resolve_implementation("dense", [device]) == "dense"
    if name == "pallas":
        assert resolve_implementation("pallas", [device]) == "pallas"
    else:
        with pytest.raises(ValueError, match="'pallas' needs"):
            resolve_implementation("pallas", [device])
    with pytest.raises(ValueError, match="'flash' is not one of"):
        resolve_implementation("flash", [device])
