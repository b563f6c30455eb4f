"""Anchor sampling: uniform, without replacement, a function of (key, sample) only."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.anchors import candidate_positions, sample_anchors, uniform_anchors

KEY = jax.random.key(0)
LENGTH, ANCHORS = 12, 5
sample = jax.jit(sample_anchors, static_argnums=3)


def mask_of(text: str) -> jax.Array:
    return jnp.array([[c == "1" for c in row] for row in text.split()])


masks = st.lists(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=3, max_size=3
).map(np.array)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(masks, st.integers(0, 2**31 - 1), st.sampled_from([1, ANCHORS, LENGTH, LENGTH + 4]))
def test_anchors_without_replacement_from_valid_positions(mask, seed, num_anchors):
    """As many as there are candidates and room for, all different, ascending; the rest is 0."""
    positions, valid = map(
        np.asarray, sample(jax.random.key(seed), jnp.arange(3), mask, num_anchors)
    )
    assert positions.shape == valid.shape == (3, num_anchors)
    assert positions.dtype == np.int32
    for row in range(3):
        candidates = [p for p in range(LENGTH - 1) if mask[row, p] and mask[row, p + 1]]
        chosen = positions[row][valid[row]].tolist()
        assert len(chosen) == min(len(candidates), num_anchors)
        assert set(chosen) <= set(candidates)
        assert chosen == sorted(set(chosen))
        assert not positions[row][~valid[row]].any()


def test_candidates():
    """The next token must be supervised too; the last position has none."""
    got = candidate_positions(mask_of("0110111 1000001"))
    np.testing.assert_array_equal(got, mask_of("0100110 0000000"))


def test_every_valid_position_is_reachable_equally_often():
    """4000 draws of 3 of 8 candidates: each with probability 3/8 (5 standard deviations)."""
    mask, draws = jnp.repeat(mask_of("011110111111"), 4000, axis=0), 4000
    positions, valid = sample(KEY, jnp.arange(draws), mask, 3)
    assert valid.all()
    counts = np.bincount(np.asarray(positions).ravel(), minlength=12)
    candidates = np.asarray(candidate_positions(mask[:1]))[0]
    assert candidates.sum() == 8
    assert not counts[~candidates].any()
    p = 3 / 8
    assert np.abs(counts[candidates] - draws * p).max() < 5 * np.sqrt(draws * p * (1 - p))
    # Pairs too: no two positions are tied together.
    pairs = {tuple(pair) for row in np.asarray(positions) for pair in (row[:2], row[1:], row[::2])}
    assert len(pairs) == 8 * 7 // 2


def test_resampled_by_epoch_key_and_by_sample():
    mask = np.ones((2, 40), bool)
    first, _ = sample(KEY, jnp.array([3, 4]), mask, ANCHORS)
    again, _ = sample(KEY, jnp.array([3, 4]), mask, ANCHORS)
    epoch, _ = sample(jax.random.key(1), jnp.array([3, 4]), mask, ANCHORS)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], epoch[0])
    assert not np.array_equal(first[1], epoch[1])
    assert not np.array_equal(first[0], first[1])


def test_row_independent_of_batch_and_padding():
    """A row keeps its anchors when it moves, gets other neighbours, or more trailing padding."""
    mask = np.random.default_rng(0).random((4, 30)) < 0.7
    ids = jnp.array([7, -1, 9, 4])  # -1: a filler row's
    positions, valid = sample(KEY, ids, mask, ANCHORS)
    order = np.array([2, 0, 3, 1])
    moved = sample(KEY, ids[order], mask[order], ANCHORS)
    np.testing.assert_array_equal(moved[0], positions[order])
    np.testing.assert_array_equal(moved[1], valid[order])
    padded = sample(KEY, ids[:1], np.pad(mask[:1], ((0, 0), (0, 10))), ANCHORS)
    np.testing.assert_array_equal(padded[0], positions[:1])


def test_device_count_does_not_matter():
    mask = np.random.default_rng(1).random((8, 30)) < 0.7
    want, _ = sample(KEY, jnp.arange(8), mask, ANCHORS)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    got, _ = sample(KEY, *jax.device_put((jnp.arange(8), mask), rows), ANCHORS)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        pytest.param("011111111110", [1, 4, 7], id="one-response"),
        pytest.param("111100111110", [0, 6, 9], id="two-turns-3-is-alone"),
        pytest.param("111111111111", [0, 3, 6, 9], id="whole-row"),
        pytest.param("000000000000", [], id="empty"),
        pytest.param("100000000001", [], id="nothing-after"),
    ],
)
def test_uniform_blocks(mask, want):
    draw = partial(uniform_anchors, block_size=3)
    positions, valid = draw(KEY, jnp.arange(1), mask_of(mask), ANCHORS)
    assert positions[0][valid[0]].tolist() == want
    assert positions.shape == (1, ANCHORS)
    assert not np.asarray(positions)[~np.asarray(valid)].any()


def test_uniform_blocks_beyond_the_number_of_anchors():
    positions, valid = uniform_anchors(KEY, jnp.arange(1), jnp.ones((1, 12), bool), 2, block_size=3)
    assert positions.tolist() == [[0, 3]]
    assert valid.all()
