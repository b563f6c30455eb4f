"""Where numbers go: a progress bar, `metrics.jsonl` (every step once) and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from tensorboardX import SummaryWriter

LOG = "metrics.jsonl"


class NonFiniteError(RuntimeError):
    """The loss or its gradient is no longer a number; the state must not be saved."""


def keep_rows(path: Path, last_step: int) -> int:
    """Drops the rows of `path` beyond `last_step`, and half a row at its end; returns those kept.

    A run that was killed has logged steps that its checkpoint does not hold; they come again.
    """
    if not path.exists():
        return 0
    kept = []
    for line, row in _rows(path):
        if row["step"] <= last_step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
    return len(kept)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All whole rows of a `metrics.jsonl`.

    Raises:
      ValueError: a line is damaged, with file and line.
    """
    return [row for _, row in _rows(Path(path))]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines and what they hold, without half a row at the end: its process was killed."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int or "kind" not in row:
            raise ValueError(f"{path}: line {number} has no step and kind: {line.strip():.60}")
        yield line, row


def lacks_evaluation(path: Path, step: int) -> bool:
    """Whether `step` was logged and its evaluation was not: the run ended in between."""
    rows = read_rows(path) if path.exists() else []
    return {row["kind"] for row in rows if row["step"] == step} == {"train"}


class Metrics:
    """Writes rows as they come; a context manager.

    Args:
      workdir: gets `metrics.jsonl` and `tensorboard/`.
      start_step: of the restored checkpoint; rows beyond it are dropped.
      num_steps: length of the bar.
      log_every: steps between two lines where the output is no terminal, and TensorBoard points.
      writes: False on all hosts but one.
    """

    def __init__(
        self,
        workdir: Path,
        start_step: int,
        num_steps: int,
        log_every: int,
        console: Console,
        writes: bool = True,
    ):
        self.path = workdir / LOG
        self._console, self._log_every, self._num_steps = console, log_every, num_steps
        self._file, self._board = None, None
        if writes:
            keep_rows(self.path, start_step)
            self._file = self.path.open("a")
            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not (writes and console.is_terminal),
        )
        self._bar: TaskID = self._progress.add_task("", total=num_steps, completed=start_step)
        self._writes = writes

    def __enter__(self) -> Metrics:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()

    def train(self, step: int, row: Mapping[str, Any]) -> None:
        """One training step's numbers."""
        shown = step % self._log_every == 0 or step == self._num_steps
        self._write(step, "train", row, board=shown)
        text = (
            f"loss {row['loss']:.4f}  accuracy {row['accuracy']:.3f}  "
            f"acceptance {row['acceptance']:.2f}  lr {row['learning_rate']:.2e}"
        )
        self._progress.update(self._bar, completed=step, description=text)
        if shown and self._writes and not self._console.is_terminal:
            self.say(f"step {step}/{self._num_steps}  {text}")

    def evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """The numbers of an evaluation after `step` steps."""
        self._write(step, "eval", row, board=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._writes:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _write(self, step: int, kind: str, row: Mapping[str, Any], board: bool) -> None:
        if self._file is None or self._board is None:
            return
        values = {"step": step, "kind": kind, **row}
        self._file.write(json.dumps({k: _json_value(v) for k, v in values.items()}) + "\n")
        self._file.flush()
        if board:
            for name, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._board.add_scalar(f"{kind}/{name}", value, step)


def _json_value(value: Any) -> Any:
    """NaN is no JSON; a number that was not measured is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
