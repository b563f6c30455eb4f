"""Numbers of timed runs: rates of one way of decoding, both ways compared, rows that part."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from dflash_jax.generation import GenerationOutput, Request
from infer.timing import TimedRun, timed_run

T = TypeVar("T")


def fill_batches(prompts: Sequence[T], batch_size: int) -> list[list[T]]:
    """Batches of equal size, one compilation for all; the last is filled up from the front."""
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} must be >= 1")
    count = -(-len(prompts) // batch_size)
    filled = [prompts[i % len(prompts)] for i in range(count * batch_size)]
    return [filled[i : i + batch_size] for i in range(0, len(filled), batch_size)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(
    repeats: list[list[TimedRun]], weight_bytes: float, bandwidth: float
) -> dict[str, Any]:
    """Rates of one way of decoding. A step is one turn of the loop: all rows of a batch."""
    steps = sum(run.iterations for run in repeats[0])
    tokens = sum(run.tokens for run in repeats[0])
    # The first token of a row comes from the prefill.
    decoded = tokens - sum(bool(row) for run in repeats[0] for row in run.output.token_ids)
    decode_s = [sum(run.decode_s for run in runs) for runs in repeats]
    prefill_s = [sum(run.prefill_s for run in runs) for runs in repeats]
    if not steps:
        raise ValueError("max_new_tokens: nothing is left to decode after the prefill")
    outputs = [run.output for run in repeats[0]]
    step_ms = _spread([1e3 * seconds / steps for seconds in decode_s])
    floor_ms = 1e3 * weight_bytes / bandwidth
    return {
        "step_ms": step_ms,
        "steps": steps,
        "tokens": tokens,
        "prefill_ms": _spread([1e3 * seconds / len(repeats[0]) for seconds in prefill_s]),
        "decode_tokens_per_second": _spread([decoded / seconds for seconds in decode_s]),
        "tokens_per_second": _spread(
            [tokens / (a + b) for a, b in zip(prefill_s, decode_s, strict=True)]
        ),
        "mean_acceptance_length": _tau(outputs),
        "weight_bytes": weight_bytes,
        "floor_ms": floor_ms,
        "times_floor": step_ms["median"] / floor_ms,
    }


def _tau(outputs: Sequence[GenerationOutput]) -> float | None:
    """tau over all batches; None without a whole cycle."""
    joined = GenerationOutput(
        token_ids=[],
        acceptance_lengths=[row for output in outputs for row in output.acceptance_lengths],
        finish_reasons=[],
        cut=[cut for output in outputs for cut in output.cut],
    )
    tau = joined.mean_acceptance_length
    return tau if np.isfinite(tau) else None


def compare(plain: dict[str, Any], speculative: dict[str, Any]) -> dict[str, float]:
    """What a cycle costs in plain steps and what it brings, from two of `summarize`."""
    cost = speculative["step_ms"]["median"] / plain["step_ms"]["median"]
    rate = "decode_tokens_per_second"
    return {
        "cycle_cost_in_steps": cost,
        "break_even_acceptance": cost,
        "decode_speedup": speculative[rate]["median"] / plain[rate]["median"],
        "speedup": speculative["tokens_per_second"]["median"]
        / plain["tokens_per_second"]["median"],
    }


def count_identical(plain: list[TimedRun], speculative: list[TimedRun]) -> dict[str, Any]:
    """How many rows have the same ids either way."""
    same = [
        a == b
        for one, other in zip(plain, speculative, strict=True)
        for a, b in zip(one.output.token_ids, other.output.token_ids, strict=True)
    ]
    return {
        "rows": len(same),
        "different": same.count(False),
        "fraction": same.count(True) / len(same),
    }


def margins_where_parted(plain: list[Request], speculative: list[Request]) -> list[float]:
    """For each row that parts, how far the two first different tokens are from each other in the
    target's log-probability: a near-tie is close to 0. Runs again, recording log-probabilities."""
    margins = []
    for one, other in zip(plain, speculative, strict=True):
        a, b = (
            timed_run(
                dataclasses.replace(r, spec=dataclasses.replace(r.spec, logprobs=True))
            ).output
            for r in (one, other)
        )
        assert a.logprobs is not None
        assert b.logprobs is not None
        for i, (ids, others) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            parted = [
                j for j, pair in enumerate(zip(ids, others, strict=False)) if len({*pair}) > 1
            ]
            if parted:
                margins.append(abs(a.logprobs[i][parted[0]] - b.logprobs[i][parted[0]]))
    return margins
