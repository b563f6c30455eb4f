"""Cells of an evaluation and how each is measured; the command is `evaluate_drafter.py`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.drafter import Drafter
from dflash_jax.errors import DFlashError
from dflash_jax.generation import GenerationOutput, Request, make_request
from dflash_jax.refill import Job, generate_many
from dflash_jax.target import Target
from infer.comparison import (
    compare,
    count_identical,
    fill_batches,
    margins_where_parted,
    summarize,
)
from infer.timing import TimedRun, cycle_weight_bytes, step_weight_bytes, timed_run, warm_up
from train.acceptance import summarize_acceptance
from train.heldout import HeldOutSet
from train.regenerate import RegenerateSettings


@dataclasses.dataclass(frozen=True)
class Cell:
    """One line of the results. `batch_size` None: acceptance over all prompts, not timed."""

    set: str
    temperature: float
    batch_size: int | None
    block_size: int
    draft_policy: str

    @property
    def key(self) -> str:
        way = "tau" if self.batch_size is None else f"batch {self.batch_size}"
        return (
            f"{self.set}, T {self.temperature:g}, {way}, block {self.block_size}, "
            f"{self.draft_policy}"
        )


# Lists of numbers, which go on one line.
_NUMBERS = re.compile(r"\[[-+.\de\s,]+\]")


class Results:
    """The JSON file: `run` says what was evaluated, `cells` has a record each.

    Raises:
      DFlashError: the file belongs to another run, with the field and both values.
    """

    def __init__(self, path: Path | None, run: dict[str, Any], header: dict[str, Any]):
        self.path = path
        self.content = {**header, "run": run, "cells": {}}
        if path is not None and path.exists():
            try:
                old = json.loads(path.read_text(encoding="utf-8"))
                old_run, cells = old["run"], old["cells"]
            except (ValueError, KeyError, TypeError) as error:
                raise DFlashError(f"{path}: not a file of this command ({error!r})") from None
            for field, value in run.items():
                if old_run.get(field) != value:
                    raise DFlashError(
                        f"{path}: {field} was {old_run.get(field)!r}, is {value!r} now; continue "
                        "with the same settings or choose another file"
                    )
            self.content["cells"] = cells
            commands = [*old.get("earlier_commands", []), old.get("command")]
            others = [c for c in commands if c != header["command"]]
            self.content["earlier_commands"] = [
                c for i, c in enumerate(others) if c not in others[:i]
            ]

    def has(self, cell: Cell, settings: dict[str, Any]) -> bool:
        return self.content["cells"].get(cell.key, {}).get("settings") == settings

    def add(self, cell: Cell, settings: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Records a cell and writes the file, whole or not at all."""
        self.content["cells"][cell.key] = {
            **dataclasses.asdict(cell),
            "settings": settings,
            **numbers,
        }
        if self.path is not None:
            part = self.path.with_name(self.path.name + ".part")
            text = _NUMBERS.sub(
                lambda m: " ".join(m[0].split()), json.dumps(self.content, indent=1)
            )
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.path)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What the measurements share. `num_slots`: the fewest cache slots that fit every prompt of
    the sets, so that one compilation serves them all."""

    target: Target
    drafter: Drafter
    sets: dict[str, HeldOutSet]
    max_new_tokens: int
    num_slots: int
    seed: int

    def jobs(self, cell: Cell) -> list[Job]:
        """The prompts of a cell, each with its own seed."""
        settings = RegenerateSettings(temperature=cell.temperature, seed=self.seed)
        prompts = self.sets[cell.set]
        return [
            Job((cell, i), ids, settings.sampling(key), self.max_new_tokens)
            for i, (key, ids) in enumerate(zip(prompts.ids, prompts.prompt_ids, strict=True))
        ]

    def requests(self, cell: Cell, plain: bool) -> list[Request]:
        """Batches of a cell; the last one is filled up from the front."""
        assert cell.batch_size is not None
        drafting: dict[str, Any] = {}
        if not plain:
            drafting = {"block_size": cell.block_size, "draft_policy": cell.draft_policy}
        return [
            make_request(
                self.target,
                None if plain else self.drafter,
                [job.prompt_ids for job in batch],
                sampling=[job.sampling for job in batch],
                max_new_tokens=self.max_new_tokens,
                num_slots=self.num_slots,
                **drafting,
            )
            for batch in fill_batches(self.jobs(cell), cell.batch_size)
        ]


Advance = Callable[[int], None]


def measure_acceptance(
    evaluation: Evaluation, cells: Sequence[Cell], batch_size: int, advance: Advance
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yields cells as their last prompt finishes. Cells of one block size and policy share a batch;
    sampled ones come first, as the loop that serves both kinds is then compiled once."""
    groups = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: -cell.temperature):
        groups[cell.block_size, cell.draft_policy].append(cell)
    for (block_size, policy), group in groups.items():
        jobs = [job for cell in group for job in evaluation.jobs(cell)]
        outputs: dict[Cell, dict[int, GenerationOutput]] = {cell: {} for cell in group}
        for job, output in generate_many(
            evaluation.target,
            evaluation.drafter,
            jobs,
            batch_size=batch_size,
            num_slots=evaluation.num_slots,
            block_size=block_size,
            draft_policy=policy,
        ):
            cell, index = job.key
            outputs[cell][index] = output
            advance(1)
            if len(outputs[cell]) == len(evaluation.sets[cell.set].ids):
                rows = [outputs[cell][i] for i in sorted(outputs[cell])]
                yield cell, {"acceptance": summarize_acceptance(rows, block_size)}


def measure_speed(
    evaluation: Evaluation, cells: Sequence[Cell], repeats: int, bandwidth: float, advance: Advance
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yields timed cells. Those of one set, temperature and batch size share the plain runs; the
    ways alternate batch by batch, so that a drift of the clock hits all of them."""
    groups = defaultdict(list)
    for cell in cells:
        groups[cell.set, cell.temperature, cell.batch_size].append(cell)
    target, drafter = evaluation.target, evaluation.drafter
    for (name, _, rows), group in groups.items():
        assert rows is not None
        ways = [evaluation.requests(group[0], plain=True)]
        ways += [evaluation.requests(cell, plain=False) for cell in group]
        for requests in ways:
            warm_up(requests[0])
        runs: list[list[list[TimedRun]]] = [[] for _ in ways]
        for _ in range(repeats):
            for taken in runs:
                taken.append([])
            for batch in zip(*ways, strict=True):
                for taken, request in zip(runs, batch, strict=True):
                    taken[-1].append(timed_run(request))
                    advance(1)
        plain = summarize(runs[0], step_weight_bytes(target, rows), bandwidth)
        count = len(evaluation.sets[name].ids)
        for cell, requests, taken in zip(group, ways[1:], runs[1:], strict=True):
            weights = cycle_weight_bytes(target, drafter, rows * cell.block_size)
            speculative = summarize(taken, weights, bandwidth)
            outputs = [run.output.row(i) for run in taken[0] for i in range(rows)]
            identical = count_identical(runs[0][0], taken[0])
            if identical["different"] and not cell.temperature:
                identical["margins"] = margins_where_parted(
                    *_parted(ways[0], requests, runs[0][0], taken[0])
                )
            yield (
                cell,
                {
                    "plain": plain,
                    "speculative": speculative,
                    "comparison": compare(plain, speculative),
                    "identical": identical,
                    "acceptance": summarize_acceptance(outputs[:count], cell.block_size),
                },
            )


def _parted(
    plain: Sequence[Request],
    speculative: Sequence[Request],
    plain_runs: Sequence[TimedRun],
    speculative_runs: Sequence[TimedRun],
) -> tuple[list[Request], list[Request]]:
    """The batches with a row that parts."""
    found = [
        (a, b)
        for a, b, one, other in zip(plain, speculative, plain_runs, speculative_runs, strict=True)
        if one.output.token_ids != other.output.token_ids
    ]
    return [a for a, _ in found], [b for _, b in found]
