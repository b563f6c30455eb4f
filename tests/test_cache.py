"""Caches with per-row lengths: writes, roll-back by length, rows put in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import cache as kv
from dflash_jax.attention import attend, masked_softmax
from dflash_jax.masks import causal_mask

SLOTS, STEP = 12, 3
write = jax.jit(kv.write)


def test_an_empty_cache() -> None:
    cache = kv.init_cache(2, 3, SLOTS, 4, 5, jnp.bfloat16)
    arrays = cache.k + cache.v
    assert len(arrays) == 4
    assert {(a.shape, a.dtype) for a in arrays} == {((3, 4, SLOTS, 5), jnp.dtype(jnp.bfloat16))}
    assert len({id(a) for a in arrays}) == 4  # each is updated in place, none is shared
    assert cache.length_B.tolist() == [0, 0, 0]
    assert cache.num_slots == SLOTS


@pytest.mark.parametrize("batch", [1, 3])
def test_write_places_each_row_at_its_own_start(batch: int) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=(batch, 2, SLOTS, 4)).astype(np.float32)
    new = rng.normal(size=(batch, 2, STEP, 4)).astype(np.float32)
    start = np.array([0, 5, SLOTS - STEP])[-batch:].astype(np.int32)
    wanted = old.copy()
    for row in range(batch):
        wanted[row, :, start[row] : start[row] + STEP] = new[row]
    np.testing.assert_array_equal(write(old, new, start), wanted)


def test_write_keeps_the_caches_dtype() -> None:
    out = kv.write(jnp.zeros((1, 1, 4, 2), jnp.bfloat16), jnp.ones((1, 1, 1, 2)), jnp.array([1]))
    assert out.dtype == jnp.bfloat16


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, STEP), min_size=2, max_size=2), min_size=1, max_size=SLOTS // STEP
    ),
    st.integers(0, 2**31),
)
def test_roll_back_by_length_forgets_what_was_rejected(accepted, seed) -> None:
    """Any pattern of acceptance: attention sees what a cache of the kept entries alone holds."""
    rng = np.random.default_rng(seed)
    cache = kv.init_cache(1, 2, SLOTS, 1, 4, jnp.float32)
    kept: list[list[np.ndarray]] = [[], []]
    for counts in accepted:
        k = rng.normal(size=(2, 1, STEP, 4)).astype(np.float32)
        start = cache.length_B
        cache = kv.write_layers(cache, (k,), (k * 2,), start)
        cache = kv.commit(cache, start + np.array(counts, np.int32))
        for row, count in enumerate(counts):
            kept[row] += list(k[row, 0, :count])
    query = jnp.ones((2, 1, 1, 1, 4))
    mask = causal_mask(cache.length_B[:, None] - 1, SLOTS)
    out = np.asarray(attend(query, cache.k[0], cache.v[0], mask))[:, 0, 0, 0]
    for row in range(2):
        assert cache.length_B[row] == len(kept[row])
        if not kept[row]:
            assert (out[row] == 0).all()
            continue
        keys = np.stack(kept[row])
        weights = np.exp(keys.sum(1) / 2)
        wanted = (weights / weights.sum()) @ (keys * 2)
        np.testing.assert_allclose(out[row], wanted, atol=1e-5)


def test_insert_rows_replaces_whole_rows_and_drops_numbers_beyond() -> None:
    batch = {"a": np.arange(12.0).reshape(4, 3), "b": np.arange(4)}
    group = {"a": -np.ones((3, 3)), "b": np.array([10, 11, 12])}
    out = kv.insert_rows(jax.tree.map(jnp.asarray, batch), np.array([2, 0, 4]), group)
    assert out["b"].tolist() == [11, 1, 10, 3]
    assert out["a"][:, 0].tolist() == [-1, 3, -1, 9]


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    scores = jnp.array([[1.0, 2.0], [3.0, 3.0]])
    mask = jnp.array([[False, False], [True, True]])
    assert masked_softmax(scores, mask).tolist() == [[0, 0], [0.5, 0.5]]
    gradient = jax.grad(lambda s: masked_softmax(s, mask)[0].sum())(scores)
    assert (gradient == 0).all()
