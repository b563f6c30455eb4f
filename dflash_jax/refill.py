"""Generation for many prompts at a fixed batch size: a finished row is refilled at once.

A prompt's result does not depend on its neighbours or on when it was inserted, so a run can be
stopped and taken up at any prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.cache import insert_rows
from dflash_jax.decode import DecodeSpec
from dflash_jax.drafter import Drafter
from dflash_jax.generation import (
    CustomDrafter,
    GenerationOutput,
    Request,
    SamplingParams,
    collect,
    make_request,
)
from dflash_jax.sampling import SamplingMode
from dflash_jax.target import Target
from dflash_jax.verify import RUNNING


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt of a long run.

    Attributes:
      key: the caller's own, returned with the result.
      prompt_ids: not empty.
      sampling: may differ from prompt to prompt.
      max_new_tokens: budget of this prompt.
    """

    key: Any
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    max_new_tokens: int


_insert = jax.jit(insert_rows, donate_argnums=0)


def generate_many(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    jobs: Iterable[Job],
    *,
    batch_size: int,
    num_slots: int,
    cycles_per_step: int = 8,
    refill_size: int | None = None,
    **options: Any,
) -> Iterator[tuple[Job, GenerationOutput]]:
    """Yields (job, its output) in the order they finish.

    Args:
      jobs: read lazily, one at a time.
      batch_size: rows decoded together; memory is `batch_size * num_slots` cache entries.
      num_slots: cache slots a row; every prompt + budget + block must fit.
      cycles_per_step: cycles between two looks at which rows have finished. More means fewer
        interruptions and more idle rows.
      refill_size: finished rows are refilled by so many at once (one prefill for all of them), by
        default an eighth of the batch. More means fewer prefills and more idle rows.
      options: as in `generate_ids` (stop_token_ids, block_size, draft_policy, logprobs, ...).

    Raises:
      ValueError: a prompt does not fit or is malformed; what was yielded before stands.
    """
    if batch_size < 1 or cycles_per_step < 1:
        raise ValueError(
            f"batch_size {batch_size} and cycles_per_step {cycles_per_step} must be >= 1"
        )
    source = iter(jobs)
    first = list(itertools.islice(source, batch_size))
    if not first:
        return

    def request(batch: Sequence[Job]) -> Request:
        return make_request(
            target,
            drafter,
            [job.prompt_ids for job in batch],
            sampling=[job.sampling for job in batch],
            max_new_tokens=[job.max_new_tokens for job in batch],
            num_slots=num_slots,
            **options,
        )

    whole = request(first)
    state = whole.prefill()
    rows: list[Job | None] = list(first)
    lengths = whole.prompt_length_B.copy()
    size = min(refill_size or max(1, batch_size // 8), len(first))
    waiting = next(source, None)
    while True:
        finish_B = np.asarray(state.finish_B)
        ended = [i for i, job in enumerate(rows) if job is not None and finish_B[i] != RUNNING]
        if ended:
            results = collect(state, lengths, ended)
            for i, row in enumerate(ended):
                job = rows[row]
                assert job is not None
                rows[row] = None
                yield job, results.row(i)
        free = [i for i, job in enumerate(rows) if job is None]
        idle = len(free) == len(rows)
        if waiting is not None and (len(free) >= size or idle):
            group: list[Job] = []
            while waiting is not None and len(group) < size:
                group.append(waiting)
                waiting = next(source, None)
            taken = free[: len(group)]
            # Filled up to one static size; the copies land beyond the batch and are dropped.
            padded = request([*group, *[group[-1]] * (size - len(group))])
            if padded.spec.mode is not whole.spec.mode:
                whole = dataclasses.replace(whole, spec=_richer(whole.spec, padded.spec))
            places = np.full(size, len(rows), np.int32)
            places[: len(taken)] = taken
            state = _insert(state, places, padded.prefill())
            for place, job, length in zip(taken, group, padded.prompt_length_B, strict=False):
                rows[place], lengths[place] = job, length
        elif idle:
            return
        state = whole.run(state, cycles_per_step)


def _richer(a: DecodeSpec, b: DecodeSpec) -> DecodeSpec:
    """The spec whose sampling mode serves both; rows give the same tokens under a richer mode."""
    order = list(SamplingMode)
    return a if order.index(a.mode) >= order.index(b.mode) else dataclasses.replace(a, mode=b.mode)
