"""Last part of scripts/demo.sh: held-out prompts answered with a drafter, beside plain decoding."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from dflash_jax.drafter import Drafter
from dflash_jax.errors import DFlashError
from dflash_jax.generation import make_request
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import Target
from infer import stream
from infer.bench_report import environment
from infer.timing import TimedRun, timed_run, warm_up
from train.acceptance import summarize_acceptance

_TARGET = flags.DEFINE_string("target", None, "Folder, hub id, GGUF or alias.", required=True)
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of the trained drafter.", required=True)
_ANSWERS = flags.DEFINE_string("answers", None, "Held-out rows (JSONL).", required=True)
_BLOCK = flags.DEFINE_integer("block_size", None, "Slots a cycle; None = as trained.")
_PROMPTS = flags.DEFINE_integer("prompts", 8, "Held-out prompts to time.", lower_bound=1)
_SHOWN = flags.DEFINE_integer("shown", 2, "Of them, answers to stream.", lower_bound=0)
_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Per answer.", lower_bound=1)
_REPEATS = flags.DEFINE_integer(
    "repeats", 1, "Timed runs of each kind; medians count.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "Where to write the numbers (JSON).")


def read_rows(path: str, count: int) -> list[dict[str, Any]]:
    """The first regenerated rows of a file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    if not lines:
        raise DFlashError(f"{path}: no rows")
    return [json.loads(line) for line in lines[:count]]


def options(drafter: Drafter | None) -> dict[str, Any]:
    """What every request of the demo asks for."""
    block = None if drafter is None else _BLOCK.value
    return {"max_new_tokens": _TOKENS.value, "block_size": block}


def show(console: Console, target: Target, drafter: Drafter, row: dict[str, Any]) -> None:
    """Streams one answer."""
    question = " ".join(row["messages"][-1]["content"].split())
    console.print(f"\n[bold]> {question[:300]}[/bold]")
    for piece in stream(target, drafter, row["prompt_ids"], **options(drafter)):
        print(piece, end="", flush=True)
    print()


def timed(target: Target, drafter: Drafter | None, rows: list[dict[str, Any]]) -> list[TimedRun]:
    """The median run of every prompt at batch 1, compilation excluded."""
    runs = []
    for row in rows:
        request = make_request(target, drafter, [row["prompt_ids"]], **options(drafter))
        warm_up(request)
        tries = [timed_run(request) for _ in range(_REPEATS.value)]
        runs.append(sorted(tries, key=lambda run: run.decode_s)[len(tries) // 2])
    return runs


def summarize(plain: list[TimedRun], fast: list[TimedRun], block_size: int) -> dict[str, Any]:
    """All numbers of the demo."""

    def rate(runs: list[TimedRun]) -> float:
        return sum(r.tokens for r in runs) / sum(r.prefill_s + r.decode_s for r in runs)

    def step_ms(runs: list[TimedRun]) -> float:
        return statistics.median(1e3 * r.decode_s / r.iterations for r in runs if r.iterations)

    accepted = summarize_acceptance([run.output for run in fast], block_size)
    cost = step_ms(fast) / step_ms(plain)
    return {
        "prompts": len(fast),
        "plain_tokens_per_second": rate(plain),
        "tokens_per_second": rate(fast),
        "speedup": rate(fast) / rate(plain),
        "identical": [
            a.output.token_ids == b.output.token_ids for a, b in zip(plain, fast, strict=True)
        ],
        "mean_acceptance_length": accepted["tau"],
        "mean_acceptance_length_looping": accepted["tau_looping"],
        "mean_acceptance_length_other": accepted["tau_other"],
        "looping": accepted["looping"],
        "histogram": accepted["histogram"],
        "plain_step_ms": step_ms(plain),
        "cycle_ms": step_ms(fast),
        "cycle_cost_in_plain_steps": cost,
        "break_even_acceptance": cost,
    }


def report(console: Console, result: dict[str, Any]) -> None:
    """Prints them.

    Raises:
      DFlashError: answers differ in float32; in bfloat16 two ways may part at a near-tie.
    """

    def number(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{value:.2f}{unit}"

    same, dtype = result["identical"], result["dtype"]
    rows = [
        ("plain decoding", f"{result['plain_tokens_per_second']:.1f} tokens/s"),
        ("speculative decoding", f"{result['tokens_per_second']:.1f} tokens/s"),
        ("speedup", number(result["speedup"], "x")),
        ("ids identical", f"{sum(same)} of {len(same)} answers ({dtype})"),
        ("mean acceptance length", number(result["mean_acceptance_length"], " tokens a cycle")),
        ("  answers that loop", number(result["mean_acceptance_length_looping"])),
        ("  the other answers", number(result["mean_acceptance_length_other"])),
        ("cost of a cycle", number(result["cycle_cost_in_plain_steps"], " plain steps")),
        ("break-even acceptance", number(result["break_even_acceptance"])),
    ]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print("acceptance lengths:")
    widest = max(result["histogram"].values(), default=1)
    for length, count in result["histogram"].items():
        console.print(f"  {length:>3}  {'#' * round(40 * count / widest)} {count}")
    if not all(same) and dtype == "float32":
        raise DFlashError("plain and speculative answers differ: this must not happen in float32")
    if result["speedup"] < 1:
        console.print(
            "Speculation does not pay with this drafter: it gets "
            f"{number(result['mean_acceptance_length'])} tokens from a cycle that costs "
            f"{number(result['break_even_acceptance'])} plain steps. The answers are exact all "
            "the same; more training raises the acceptance."
        )
    else:
        console.print(f"Speculation pays: {result['speedup']:.2f}x the speed, the same answers.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    console = Console(highlight=False)
    try:
        target = load_target(_TARGET.value)
        drafter = load_drafter(_DRAFTER.value, target)
        rows = read_rows(_ANSWERS.value, _PROMPTS.value)
        for row in rows[: _SHOWN.value]:
            show(console, target, drafter, row)
        console.print("\ntiming both kinds of decoding ...")
        result = {
            "command": ["python", "scripts/demo.py", *sys.argv[1:]],
            **environment(),
            "dtype": np.dtype(target.model.dtype).name,
            **summarize(
                timed(target, None, rows),
                timed(target, drafter, rows),
                _BLOCK.value or drafter.config.block_size,
            ),
        }
        if _OUTPUT.value:
            Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        report(console, result)
    except (DFlashError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
