"""Generation for many prompts at a fixed batch size: a finished row is refilled at once.

A prompt's result does not depend on its neighbours or on when it was inserted, so a run can be
stopped and taken up at any prompt.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.cache import insert_rows
from dflash_jax.decode import DecodeSpec, DecodeState
from dflash_jax.drafter import Drafter
from dflash_jax.generation import (
    CustomDrafter,
    GenerationOutput,
    Request,
    SamplingParams,
    make_request,
    results,
    to_output,
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


@jax.jit
def _gather(state: DecodeState, rows_R: jax.Array) -> dict[str, jax.Array]:
    """Copies of the results of some rows: they outlive the state, whose buffers are given away."""
    return jax.tree.map(lambda array: array[rows_R], results(state))


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

    The device does not wait for the caller: the next cycles are dispatched before results are
    fetched and yielded, and the next jobs are read and checked while it runs.

    Args:
      jobs: read lazily, ahead of the rows in work by what one refill may need.
      batch_size: rows decoded together; memory is `batch_size * num_slots` cache entries.
      num_slots: cache slots a row; every prompt + budget + block must fit.
      cycles_per_step: cycles between two looks at which rows have finished. More means fewer
        interruptions and more idle rows.
      refill_size: finished rows are refilled in groups of this one compiled size, each with one
        prefill, as soon as so many are free; by default a sixteenth of the batch. More means fewer
        prefills and more idle rows.
      options: as in `generate_ids` (stop_token_ids, block_size, draft_policy, logprobs, ...).

    Raises:
      ValueError: a prompt does not fit or is malformed. Where that shows after the first batch
        (or `jobs` itself raises), the rows in work are finished and yielded first.
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
    size = min(refill_size or max(1, batch_size // 16), len(first))
    groups = _Groups(source, request, size)
    ahead = 1
    groups.prepare(ahead)
    while True:
        finish_B = np.asarray(state.finish_B)
        ended = [i for i, job in enumerate(rows) if job is not None and finish_B[i] != RUNNING]
        parts = [
            _gather(state, _padded(ended[at : at + size], size, ended[-1]))
            for at in range(0, len(ended), size)
        ]
        done, done_lengths = [rows[i] for i in ended], lengths[ended]
        for i in ended:
            rows[i] = None
        free = [i for i, job in enumerate(rows) if job is None]
        inserted = 0
        while len(free) >= size and (group := groups.take()):
            inserted += 1
            if group.request.spec.mode is not whole.spec.mode:
                whole = dataclasses.replace(whole, spec=_richer(whole.spec, group.request.spec))
            taken, free = free[: len(group.jobs)], free[len(group.jobs) :]
            # Copies that fill a group up land beyond the batch and are dropped.
            state = _insert(state, _padded(taken, size, len(rows)), group.request.prefill())
            lengths[taken] = group.request.prompt_length_B[: len(taken)]
            for place, new in zip(taken, group.jobs, strict=True):
                rows[place] = new
        going = any(job is not None for job in rows)
        if going:
            state = whole.run(state, cycles_per_step)
        # The device is at work from here on.
        for at, part in zip(range(0, len(ended), size), jax.device_get(parts), strict=True):
            chosen = slice(at, at + size)
            count = len(done[chosen])
            output = to_output({k: v[:count] for k, v in part.items()}, done_lengths[chosen])
            for i, job in enumerate(done[chosen]):
                assert job is not None
                yield job, output.row(i)
        if not going:
            if groups.error is not None:
                raise groups.error
            return
        ahead = max(ahead, inserted)
        groups.prepare(ahead)


def _padded(rows: Sequence[int], size: int, filler: int) -> np.ndarray:
    """Row numbers at a static size."""
    return np.array([*rows, *[filler] * (size - len(rows))], np.int32)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Jobs to insert together, and their request, filled up to the static size."""

    jobs: list[Job]
    request: Request


class _Groups:
    """Jobs in groups of `size`, read and checked before they are asked for.

    Attributes:
      error: what the jobs or their request raised. It ends the run, but not before the rows in
        work are finished, and they are not known here.
    """

    def __init__(
        self, source: Iterator[Job], make: Callable[[Sequence[Job]], Request], size: int
    ) -> None:
        self.error: Exception | None = None
        self._source, self._make, self._size = source, make, size
        self._ready: collections.deque[_Group] = collections.deque()

    def prepare(self, count: int) -> None:
        """Makes `count` groups ready, as far as there are jobs."""
        while self.error is None and len(self._ready) < count:
            jobs: list[Job] = []
            try:
                for job in itertools.islice(self._source, self._size):
                    jobs.append(job)  # kept, should the next one raise
            except Exception as error:
                self.error = error
            if not jobs:
                return
            try:
                padded = [*jobs, *[jobs[-1]] * (self._size - len(jobs))]
                self._ready.append(_Group(jobs, self._make(padded)))
            except ValueError as error:
                self.error = error

    def take(self) -> _Group | None:
        """The next group, None at the end of the jobs."""
        self.prepare(1)
        return self._ready.popleft() if self._ready else None


def _richer(a: DecodeSpec, b: DecodeSpec) -> DecodeSpec:
    """The spec whose sampling mode serves both; rows give the same tokens under a richer mode."""
    order = list(SamplingMode)
    return a if order.index(a.mode) >= order.index(b.mode) else dataclasses.replace(a, mode=b.mode)
