"""Answers that end in a loop: what that means, for data and evaluation alike.

A small target decoded greedily often repeats itself until its budget is spent. A loop is easy to
draft, so it flatters a drafter in evaluation and teaches it nothing but copying in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOOP_WINDOW, LOOP_PERIOD, LOOP_REPEATS = 96, 32, 3


def loop_period(tokens: Sequence[int] | np.ndarray) -> int | None:
    """The shortest period, up to 32, with which the last tokens repeat three times or more."""
    tail = [int(token) for token in tokens[-LOOP_WINDOW:]]
    for period in range(1, LOOP_PERIOD + 1):
        length = LOOP_REPEATS * period
        if length > len(tail):
            return None
        if tail[-1] == tail[-1 - period]:  # seldom, so that the rest costs nothing
            end = tail[-length:]
            if end[period:] == end[:-period]:
                return period
    return None


def is_looping(tokens: Sequence[int] | np.ndarray) -> bool:
    """Whether the last tokens are a loop (`loop_period`)."""
    return loop_period(tokens) is not None


def length_without_loop(tokens: Sequence[int] | np.ndarray) -> int:
    """Tokens up to the end of the loop's first period; all of them where there is no loop.

    The loop is followed back as far as it goes, beyond the window that it was recognised in.
    """
    period = loop_period(tokens)
    if period is None:
        return len(tokens)
    array = np.asarray(tokens)
    other = np.flatnonzero(array[:-period] != array[period:])
    start = int(other[-1]) + 1 if len(other) else 0
    return start + period
