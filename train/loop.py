"""The training loop: `train(settings, workdir)`. Run again with the same workdir, it resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_jax.drafter import Drafter
from train import setup
from train.checkpoint import Checkpoints, ResumeError, check_finished, check_resume, describe
from train.evaluate import decode_prompts, rates, teacher_forced
from train.locks import only_writer
from train.metrics import LOG, Metrics, NonFiniteError, lacks_evaluation, read_rows
from train.optimizer import make_optimizer, make_schedule
from train.settings import Settings
from train.state import TrainState, create_state
from train.step import StepMetrics, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run has come to.

    Attributes:
      steps: of the whole run.
      started_at: the restored step, 0 for a fresh run; equal to `steps` if nothing was left to do.
      train: the last training row of `metrics.jsonl`.
      evaluation: the last evaluation row, {} where nothing was held out.
      seconds: of the steps, without set-up.
      workdir: holds checkpoints, metrics and data.
    """

    steps: int
    started_at: int
    train: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    seconds: float
    workdir: Path

    def table(self) -> Table:
        """The last numbers, to print."""
        table = Table("", "train (last step)", "held out", title=f"step {self.steps}")
        for name in ("loss", "accuracy", "acceptance"):
            values = (row.get(name) for row in (self.train, self.evaluation))
            table.add_row(name.replace("acceptance", "acceptance, simulated"), *map(_text, values))
        if self.evaluation:
            e = self.evaluation
            loops = f"{e['looping']} of {e['rows']} rows"
            table.add_row(f"  looping: {loops}", "", _text(e["acceptance_looping"]))
            table.add_row("  all others", "", _text(e["acceptance_other"]))
        by_slot = (row.get("accuracy_by_slot", ()) for row in (self.train, self.evaluation))
        for slot, pair in enumerate(itertools.zip_longest(*by_slot), 1):
            table.add_row(f"accuracy, slot {slot}", *map(_text, pair))
        if "decode_acceptance" in self.evaluation:
            e = self.evaluation
            table.add_row("acceptance, decoded", "", _text(e["decode_acceptance"]))
            loops = f"{e['decode_looping']} of {e['decode_prompts']} prompts"
            table.add_row(f"  looping: {loops}", "", _text(e["decode_acceptance_looping"]))
            table.add_row("  all others", "", _text(e["decode_acceptance_other"]))
        return table


def _text(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def train(settings: Settings, workdir: str | Path, console: Console | None = None) -> Summary:
    """Trains a drafter, from the newest checkpoint of `workdir` if there is one.

    Raises:
      ConfigError: the config does not fit itself, the target, or the checkpoint (`ResumeError`).
      NonFiniteError: the loss or gradient was not finite; the last checkpoint is from before.
      BusyError: another process trains in `workdir`.
    """
    workdir, console = Path(workdir).absolute(), console or Console()
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:  # of this run's processes
            stack.enter_context(only_writer(workdir / ".lock", workdir))
        return _train(settings, workdir, console)


def _train(settings: Settings, workdir: Path, console: Console) -> Summary:
    mesh = setup.build_mesh(settings)
    models = setup.build_models(settings, mesh)
    objective = setup.build_objective(settings, models)
    rows = setup.build_rows(settings, models.target, models.config.mask_token_id, workdir)
    num_steps = setup.total_steps(settings, rows)
    optimizer = make_optimizer(settings.optimizer, num_steps)
    make_params, arguments = models.initial_params(settings.train.seed)
    make_state, abstract = create_state(
        make_params, optimizer, settings.train.seed, mesh, *arguments
    )
    meta = describe(settings, models.target, models.config, rows.train.checksum())
    batches = setup.train_batches(settings, rows)
    with Checkpoints(workdir, settings.train.keep) as checkpoints:
        start, notes = checkpoints.latest_step or 0, []
        if start:
            notes = check_resume(checkpoints.restore_meta(), meta, checkpoints.path)
            if start > num_steps:
                raise ResumeError(
                    f"{checkpoints.path}: the checkpoint is of step {start}, this run has only "
                    f"{num_steps} (train.steps {settings.train.steps}, train.epochs "
                    f"{settings.train.epochs}); use another workdir"
                )
        owed = _evaluates_at(settings, rows, num_steps, start) and lacks_evaluation(
            workdir / LOG, start
        )
        if start == num_steps and not owed:
            check_finished(notes, checkpoints.path)
            console.print(f"finished: step {start} of {num_steps}, nothing left to do")
            return _summary(num_steps, num_steps, 0.0, workdir)
        if start:
            state, position = checkpoints.restore(abstract)
            batches.set_state(position)
        else:
            state = make_state()
        run = _Run(
            settings=settings,
            mesh=mesh,
            models=models,
            rows=rows,
            num_steps=num_steps,
            step=make_train_step(
                objective,
                optimizer,
                make_schedule(settings.optimizer, num_steps),
                settings.train.accumulate,
                mesh,
                abstract,
            ),
            eval_step=make_eval_step(objective, mesh),
            checkpoints=checkpoints,
            meta=meta,
        )
        with Metrics(
            workdir, start, num_steps, settings.train.log_every, console, jax.process_index() == 0
        ) as metrics:
            attention = f"attention: {objective.attention}; target: {objective.target_attention}"
            for line in (attention, *rows.reports, *notes):
                metrics.say(line)
            if start:
                metrics.say(f"resumed at step {start} of {num_steps}")
            if owed:
                metrics.say(f"the evaluation of step {start} is missing: made up for")
                run.evaluate(start, state, metrics)
            began = time.monotonic()
            run.loop(state, start, batches, metrics)
            seconds = time.monotonic() - began
    return _summary(num_steps, start, seconds, workdir)


def _summary(num_steps: int, start: int, seconds: float, workdir: Path) -> Summary:
    last: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
    log = workdir / LOG
    for row in read_rows(log) if log.exists() else []:  # the rows of a finished run may be gone
        last[row["kind"]] = row
    return Summary(num_steps, start, last["train"], last["eval"], seconds, workdir)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Everything that stays the same from step to step."""

    settings: Settings
    mesh: Any
    models: setup.Models
    rows: setup.Rows
    num_steps: int
    step: Any
    eval_step: Any
    checkpoints: Checkpoints
    meta: dict[str, Any]

    def loop(self, state: TrainState, start: int, batches: Any, metrics: Metrics) -> None:
        """Steps `start + 1` to the last. The metrics of a step are fetched after the next one has
        been dispatched, so that the device does not wait for the host."""
        every, target_params = self.settings.train, self.models.target.params
        pending: _Pending | None = None
        for step in range(start + 1, self.num_steps + 1):
            batch = next(batches)
            state, numbers = self.step(state, target_params, setup.place(batch, self.mesh))
            if pending is not None:
                self._log(pending, metrics)
            pending = _Pending(step, numbers, batch["sample_id_B"])
            evaluates = _evaluates_at(self.settings, self.rows, self.num_steps, step)
            saves = step == self.num_steps or _is_due(step, every.checkpoint_every)
            if evaluates or saves:  # nothing is judged or saved that is not known to be finite
                self._log(pending, metrics)
                pending = None
            if saves:  # before the evaluation, which may fail
                self.checkpoints.save(step, state, batches.get_state(), self.meta)
            if evaluates:
                self.evaluate(step, state, metrics)
            if saves:  # written before the next step: a kill costs one interval at most
                self.checkpoints.wait()

    def _log(self, pending: _Pending, metrics: Metrics) -> None:
        numbers: StepMetrics = jax.device_get(pending.numbers)
        loss, norm = float(numbers.loss), float(numbers.grad_norm)
        ids = pending.sample_ids_B.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.checkpoints.wait()
            saved, good = self.checkpoints.latest_step, "there is no checkpoint yet"
            if saved is not None:
                good = f"the last good checkpoint is of step {saved}"
            raise NonFiniteError(
                f"step {pending.step}: loss {loss}, gradient norm {norm}, sample ids {ids}; {good} "
                f"in {self.checkpoints.path}"
            )
        row = {
            "loss": loss,
            **rates(numbers.sums),
            "learning_rate": float(numbers.learning_rate),
            "grad_norm": norm,
            "sample_ids": ids,
            "anchor_hash": int(numbers.anchor_hash),
        }
        metrics.train(pending.step, row)

    def evaluate(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Logs teacher-forced numbers and, with prompts, those of real decoding as `decode_*`."""
        store, target = self.rows.held_out, self.models.target
        assert store is not None
        other, looping = (
            (setup.place(batch, self.mesh) for batch in batches)
            for batches in (
                setup.eval_batches(self.settings, store, loop) for loop in (False, True)
            )
        )
        row = teacher_forced(self.eval_step, state.params, target.params, other, looping)
        row |= {"rows": len(store), "looping": int(store.looping.sum())}
        prompts = self.rows.prompts(self.settings.eval.num_prompts)
        if prompts:
            drafter = Drafter(self.models.config, self.models.model, state.params)
            limit = self.settings.eval.max_new_tokens
            decoded = decode_prompts(target, drafter, prompts, limit)
            row |= {f"decode_{k}": v for k, v in dataclasses.asdict(decoded).items()}
            for size in self.settings.eval.block_sizes:
                resized = drafter.resized(size)
                decoded = decode_prompts(target, resized, prompts, limit)
                row[f"decode_block_{size}"] = dataclasses.asdict(decoded)
        metrics.evaluation(step, row)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step whose numbers are still on the device."""

    step: int
    numbers: StepMetrics
    sample_ids_B: np.ndarray


def _evaluates_at(settings: Settings, rows: setup.Rows, num_steps: int, step: int) -> bool:
    """Whether the held-out rows are looked at after this many steps."""
    due = step == num_steps or _is_due(step, settings.train.eval_every)
    return due and rows.held_out is not None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
