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

from dflash_jax.cache import insert_row
from dflash_jax.decode import DecodeSpec, DecodeState
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


insert = jax.jit(insert_row, donate_argnums=0)


@jax.jit
def _row(state: DecodeState, row: jax.Array) -> DecodeState:
    """The state of one row, without the caches' contents."""
    lengths = dataclasses.replace(state.cache, k=(), v=())
    small = dataclasses.replace(state, draft=None, cache=lengths)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), small)


def generate_many(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    jobs: Iterable[Job],
    *,
    batch_size: int,
    num_slots: int,
    cycles_per_step: int = 8,
    **options: Any,
) -> Iterator[tuple[Job, GenerationOutput]]:
    """Yields (job, its output) in the order they finish.

    Args:
      jobs: read lazily, one at a time.
      batch_size: rows decoded together; memory is `batch_size * num_slots` cache entries.
      num_slots: cache slots a row; every prompt + budget + block must fit.
      cycles_per_step: cycles between two looks at which rows have finished. More means fewer
        interruptions and more idle rows.
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
    while True:
        finish_B = np.asarray(state.finish_B)
        for row, job in enumerate(rows):
            if job is None or finish_B[row] == RUNNING:
                continue
            yield job, collect(_row(state, np.int32(row)), lengths[row : row + 1])
            rows[row] = following = next(source, None)
            if following is not None:
                single = request([following])
                if single.spec.mode is not whole.spec.mode:
                    whole = dataclasses.replace(whole, spec=_richer(whole.spec, single.spec))
                state = insert(state, np.int32(row), single.prefill())
                lengths[row] = single.prompt_length_B[0]
        if all(job is None for job in rows):
            return
        state = whole.run(state, cycles_per_step)


def _richer(a: DecodeSpec, b: DecodeSpec) -> DecodeSpec:
    """The spec whose sampling mode serves both; rows give the same tokens under a richer mode."""
    order = list(SamplingMode)
    return a if order.index(a.mode) >= order.index(b.mode) else dataclasses.replace(a, mode=b.mode)
