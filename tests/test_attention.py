"""Attention over a cache: the CPU's form for few queries against the plain one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention import FEW_ROWS, attend, masked_softmax

SLOTS, KV_HEADS, GROUPS, HEAD_DIM = 24, 2, 3, 8


def inputs(queries: int, batch: int, dtype: str) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(queries + batch)
    q = rng.normal(size=(batch, queries, KV_HEADS, GROUPS, HEAD_DIM))
    k, v = rng.normal(size=(2, batch, KV_HEADS, SLOTS, HEAD_DIM))
    first = rng.integers(0, SLOTS - queries, (batch, 1, 1)) if queries < SLOTS else 0
    mask = np.arange(SLOTS) <= first + np.arange(queries)[:, None]
    mask = np.broadcast_to(mask, (batch, queries, SLOTS)).copy()
    mask[0, 0] = False  # a query that sees nothing
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(mask)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("btkgh,bksh->bkgts", q, k) * HEAD_DIM**-0.5
    return jnp.einsum("bkgts,bksh->btkgh", masked_softmax(scores, mask[:, None, None]), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("queries", "batch"), [(1, 1), (1, 3), (2, 1), (8, 3), (FEW_ROWS + 1, 1)])
def test_every_form_is_the_same_attention(queries: int, batch: int, dtype: str) -> None:
    values = inputs(queries, batch, dtype)
    out = jax.jit(attend)(*values)
    assert out.dtype == dtype
    assert out.shape == values[0].shape
    assert not jnp.any(out[0, 0])
    tolerance = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        out.astype(np.float32), reference(*values), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("queries", [1, 4])
def test_the_cache_is_not_transposed(queries: int) -> None:
    """No instruction but the update itself makes an array of the cache's size."""
    q, k, v, mask = inputs(queries, 1, "float32")

    def step(q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
        new = q[:, :, :, 0].swapaxes(1, 2)
        k, v = (jax.lax.dynamic_update_slice(x, new, (0, 0, at, 0)) for x in (k, v))
        return attend(q, k, v, mask), k, v

    lowered = jax.jit(step, donate_argnums=(1, 2)).lower(q, k, v, jnp.int32(3))
    text = lowered.compile().as_text() or ""
    entry = text[text.index("ENTRY") :]
    size = KV_HEADS * SLOTS * HEAD_DIM
    made = re.findall(r"%(\S+) = f32\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", entry)
    large = [name for name, dims in made if np.prod([int(d) for d in dims.split(",")]) == size]
    assert large
    assert all("dynamic-update-slice" in name for name in large), large
