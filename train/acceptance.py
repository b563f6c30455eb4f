"""What decoded prompts say of a drafter: tau, acceptance by slot, with and without loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflash_jax.generation import GenerationOutput
from train.repetition import is_looping

_RESAMPLES = 1000


def summarize_acceptance(outputs: Iterable[GenerationOutput], block_size: int) -> dict[str, Any]:
    """Counts and rates over all rows, JSON-ready; None where there was no whole cycle.

    tau is committed tokens over cycles of all rows, cycles that a stop id or the budget cut
    excluded. `..._other` is of the rows whose text does not end in a loop, `..._looping` of the
    rest: a loop is easy to draft, so a target that loops flatters its drafter. Intervals are 95%,
    by resampling prompts, not cycles: the cycles of one text are alike.
    """
    rows = [
        (ids, lengths[:-1] if cut else lengths, reason)
        for output in outputs
        for ids, lengths, cut, reason in zip(
            output.token_ids,
            output.acceptance_lengths,
            output.cut,
            output.finish_reasons,
            strict=True,
        )
    ]
    loops = [is_looping(ids) for ids, _, _ in rows]
    every = [lengths for _, lengths, _ in rows]
    other = [lengths for lengths, loop in zip(every, loops, strict=True) if not loop]
    looping = [lengths for lengths, loop in zip(every, loops, strict=True) if loop]
    return {
        "prompts": len(rows),
        "looping": sum(loops),
        "stopped": sum(reason == "stop" for _, _, reason in rows),
        "tokens": sum(len(ids) for ids, _, _ in rows),
        "cycles": sum(map(len, every)),
        "tau": _tau(every),
        "tau_interval": _interval(every),
        "tau_other": _tau(other),
        "tau_other_interval": _interval(other),
        "tau_looping": _tau(looping),
        "acceptance_by_slot": _by_slot(every, block_size),
        "acceptance_by_slot_other": _by_slot(other, block_size),
        "histogram": _histogram(every),
        "histogram_other": _histogram(other),
    }


def _tau(rows: Sequence[Sequence[int]]) -> float | None:
    cycles = sum(map(len, rows))
    return sum(map(sum, rows)) / cycles if cycles else None


def _interval(rows: Sequence[Sequence[int]]) -> list[float] | None:
    """95% interval of tau, rows drawn anew with a fixed seed; None with less than two rows."""
    counts = np.array([(sum(row), len(row)) for row in rows if len(row)])
    if len(counts) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(counts), size=(_RESAMPLES, len(counts)))
    tokens, cycles = counts[drawn].sum(1).T
    return np.percentile(tokens / cycles, [2.5, 97.5]).tolist()


def _by_slot(rows: Sequence[Sequence[int]], block_size: int) -> list[float] | None:
    """Entry k - 1: share of the cycles in which the draft of slot k was accepted, k = 1..G-1."""
    lengths = np.array([length for row in rows for length in row])
    if not len(lengths):
        return None
    return [float((lengths > slot).mean()) for slot in range(1, block_size)]


def _histogram(rows: Sequence[Sequence[int]]) -> dict[str, int]:
    """Acceptance length -> cycles."""
    counts = Counter(length for row in rows for length in row)
    return {str(length): counts[length] for length in sorted(counts)}
