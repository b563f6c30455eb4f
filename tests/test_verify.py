"""Acceptance and truncation against plain Python loops."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.verify import LENGTH, RUNNING, STOP, accept, accepted_drafts, truncate

ROWS = 4
jit_accept = jax.jit(accept)
jit_truncate = jax.jit(truncate)


def loop_truncate(tokens: list[int], remaining: int, stops: set[int]) -> tuple[int, int]:
    for count, token in enumerate(tokens, start=1):
        if token in stops:
            return count, STOP
        if count == remaining:
            return count, LENGTH
    return len(tokens), RUNNING


def loop_accept(drafts, target, finish, remaining, stops, forced=None) -> tuple[int, int, bool]:
    if finish != RUNNING:
        return 0, finish, False
    right = 0
    while right < len(drafts) and drafts[right] == target[right]:
        right += 1
    whole = (right if forced is None else forced) + 1
    count, finish = loop_truncate(target[:whole], remaining, stops)
    return count, finish, count < whole


@st.composite
def blocks(draw):
    """Arguments of `accept` for four rows; few ids, so that drafts agree and stops occur."""
    block = draw(st.sampled_from([1, 2, 5, 8]))

    def rows(elements):
        return st.lists(elements, min_size=ROWS, max_size=ROWS)

    target = draw(rows(st.lists(st.integers(0, 3), min_size=block, max_size=block)))
    drafts = []
    for row in target:
        wrong_at = draw(st.integers(0, block - 1))
        drafts.append([t if k != wrong_at else (t + 1) % 4 for k, t in enumerate(row[:-1])])
    return (
        drafts,
        target,
        draw(rows(st.sampled_from([RUNNING, RUNNING, STOP, LENGTH]))),
        draw(rows(st.integers(1, block + 2))),
        draw(rows(st.lists(st.integers(-1, 3), min_size=2, max_size=2))),
        draw(st.none() | rows(st.integers(0, block - 1))),
    )


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_accept_equals_a_loop(arguments) -> None:
    drafts, target, finish, remaining, stops, forced = arguments
    got = jit_accept(
        np.array(drafts, np.int32).reshape(ROWS, -1),
        np.array(target, np.int32),
        np.array(finish, np.int32),
        np.array(remaining, np.int32),
        np.array(stops, np.int32),
        None if forced is None else np.array(forced, np.int32),
    )
    for row in range(ROWS):
        wanted = loop_accept(
            drafts[row],
            target[row],
            finish[row],
            remaining[row],
            set(stops[row]) - {-1},
            None if forced is None else forced[row],
        )
        assert (got.count_B[row], got.finish_B[row], got.cut_B[row]) == wanted


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(1, 6), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 7), min_size=ROWS, max_size=ROWS),
    st.sets(st.integers(0, 5), max_size=3),
)
def test_truncate_equals_a_loop(tokens, counts, remaining, stops) -> None:
    padded = np.full((ROWS, 4), -1, np.int32)
    padded[:, : len(stops)] = sorted(stops)
    got, finish = jit_truncate(
        np.array(tokens, np.int32), np.array(counts), np.array(remaining), padded
    )
    for row in range(ROWS):
        wanted = (0, LENGTH)  # without a budget nothing is emitted
        if remaining[row]:
            wanted = loop_truncate(tokens[row][: counts[row]], remaining[row], stops)
        assert (got[row], finish[row]) == wanted


def test_worked_row_of_the_module() -> None:
    """d1 == t0 and d2 != t1: one draft is accepted, t0 and the bonus t1 are committed."""
    drafts, target = np.array([[10, 99, 12]]), np.array([[10, 11, 12, 13]])
    assert accepted_drafts(drafts, target).tolist() == [1]
    taken = accept(drafts, target, np.array([RUNNING]), np.array([9]), np.array([[-1]]))
    assert taken.count_B.tolist() == [2]
    # A later agreement does not count: the prefix is broken.
    assert accepted_drafts(np.array([[9, 11, 12]]), target).tolist() == [0]


@pytest.mark.parametrize(
    ("stop", "count", "reason"), [(11, 2, STOP), (12, 3, STOP), (50, 3, LENGTH)]
)
def test_a_stop_within_the_budget_wins(stop: int, count: int, reason: int) -> None:
    tokens = np.array([[10, 11, 12, 13]])
    got = truncate(tokens, np.array([4]), np.array([3]), np.array([[stop, -1]]))
    assert [int(x[0]) for x in got] == [count, reason]
    # Beyond the budget or the accepted prefix a stop id does not end the row.
    got = truncate(tokens, np.array([1]), np.array([3]), np.array([[stop, -1]]))
    assert [int(x[0]) for x in got] == [1, RUNNING]
