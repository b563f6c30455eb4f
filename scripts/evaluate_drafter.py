"""A drafter on prompts it never saw: acceptance, and speed against plain decoding by the same code.

    python scripts/evaluate_drafter.py --target=smollm2-135m-instruct \\
        --drafter=smollm2-135m-dflash --num_prompts=8 --output=results.json
    python scripts/evaluate_drafter.py ... --tau_only --draft_policy=argmax,coupled

Held-out sets: `train/heldout.py`. By default whole batches are timed, plain and speculative in
turn, compilation excluded. `--tau_only` times nothing: all prompts go through one refilled batch
a block size. Results are written as they come; run again, what is there with the same settings
stays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_jax.errors import DFlashError
from dflash_jax.generation import default_prefill_chunk, slot_bucket
from dflash_jax.loading import load_drafter, load_target
from infer.bench_report import environment
from infer.timing import copy_bandwidth
from scripts.evaluation import Cell, Evaluation, Results, measure_acceptance, measure_speed
from train.chat import ChatFormat
from train.heldout import HELD_OUT_FRACTION, SETS, HeldOutSet, held_out_set

POLICIES = ("argmax", "coupled")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Adds this command's flags to `values`."""
    options: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("target", None, "Folder, hub id, GGUF or alias.", **options)
    flags.DEFINE_string("drafter", None, "Folder, hub id or alias.", **options)
    flags.DEFINE_list("sets", list(SETS), "Held-out sets.", **options)
    flags.DEFINE_list("temperatures", ["0", "1"], "0 is greedy.", **options)
    flags.DEFINE_list("batch_sizes", ["1", "8"], "Rows of a timed batch.", **options)
    flags.DEFINE_list("block_sizes", ["16", "8"], "Slots of a cycle.", **options)
    flags.DEFINE_list("draft_policy", ["argmax"], f"Of {', '.join(POLICIES)}.", **options)
    flags.DEFINE_integer("max_new_tokens", 512, "Of a prompt.", lower_bound=2, **options)
    flags.DEFINE_integer(
        "num_prompts", None, "The first ones of each set; by default all.", lower_bound=1, **options
    )
    flags.DEFINE_float(
        "held_out_fraction",
        HELD_OUT_FRACTION,
        "What the drafter's data was split with.",
        lower_bound=0,
        **options,
    )
    flags.DEFINE_bool("tau_only", False, "Acceptance of all prompts, no timing.", **options)
    flags.DEFINE_integer(
        "refill_batch_size",
        None,
        "Rows decoded together with --tau_only; by default 16 on a CPU, 128 elsewhere.",
        lower_bound=1,
        **options,
    )
    flags.DEFINE_integer("repeats", 1, "Timed runs; medians count.", lower_bound=1, **options)
    flags.DEFINE_integer("seed", 0, "Of sampling; each prompt's follows.", lower_bound=0, **options)
    flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Of both.", **options)
    flags.DEFINE_string("output", None, "JSON file to write or continue.", **options)


def _values(options: Any, name: str, kind: Callable[[str], Any]) -> list[Any]:
    """A list flag's values, without repeats."""
    try:
        values = [kind(text) for text in getattr(options, name)]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not values:
        raise ValueError(f"{name}: at least one is needed")
    return list(dict.fromkeys(values))


def make_cells(options: Any, trained_block_size: int) -> list[Cell]:
    """What to measure, timings of one set, temperature and batch size next to each other.

    Greedy drafts are the same under both policies: they are measured once.

    Raises:
      ValueError: a flag's value is not possible.
    """
    sets, policies = _values(options, "sets", str), _values(options, "draft_policy", str)
    for name, values, known in (("sets", sets, SETS), ("draft_policy", policies, POLICIES)):
        if unknown := [value for value in values if value not in known]:
            raise ValueError(f"{name}: {unknown[0]!r} is not one of {', '.join(known)}")
    blocks, batches = _values(options, "block_sizes", int), _values(options, "batch_sizes", int)
    for block in blocks:
        if not 2 <= block <= trained_block_size:
            raise ValueError(
                f"block_sizes: {block} is not in 2..{trained_block_size}, what the drafter was "
                "trained with"
            )
    if min(batches) < 1:
        raise ValueError(f"batch_sizes: {min(batches)} must be >= 1")
    cells = [
        Cell(*values)
        for values in itertools.product(
            sets,
            _values(options, "temperatures", float),
            [None] if options.tau_only else batches,
            blocks,
            policies,
        )
    ]
    greedy = [
        dataclasses.replace(c, draft_policy="argmax") if not c.temperature else c for c in cells
    ]
    return list(dict.fromkeys(greedy))


def parameters_sha256(params: Any) -> str:
    """Of all parameters with their names: which drafter was evaluated."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def evaluate(options: Any, command: Sequence[str], console: Console) -> dict[str, Any]:
    """Loads, measures what is missing, and returns the content of the results file.

    Raises:
      ValueError, OSError: options that are not possible, models or packages that are not there.
      DFlashError: the output file is another run's; or plain and speculative ids differ in float32.
    """
    for name in ("target", "drafter"):
        if not getattr(options, name):
            raise ValueError(f"{name}: must be given")
    target = load_target(options.target, dtype=options.dtype)
    drafter = load_drafter(options.drafter, target, dtype=options.dtype)
    cells = make_cells(options, drafter.config.block_size)
    chat = ChatFormat(target.tokenizer, None, target.stop_token_ids or None)
    sets = {
        name: held_out_set(name, chat, options.held_out_fraction).first(options.num_prompts)
        for name in dict.fromkeys(cell.set for cell in cells)
    }
    longest = max(len(ids) for prompts in sets.values() for ids in prompts.prompt_ids)
    largest = max(cell.block_size for cell in cells)
    slots = slot_bucket(longest + options.max_new_tokens + largest, default_prefill_chunk())
    evaluation = Evaluation(target, drafter, sets, options.max_new_tokens, slots, options.seed)
    header = {
        "command": ["python", "scripts/evaluate_drafter.py", *command],
        **environment(),
        "drafter": options.drafter,
    }
    hardware, dtype = header["hardware"], np.dtype(target.model.dtype).name
    run = {
        "target": target.name,
        "drafter_sha256": parameters_sha256(drafter.params),
        "dtype": dtype,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "jax": header["versions"]["jax"],
        **{key: hardware[key] for key in ("backend", "device", "matmul_precision")},
    }
    results = Results(Path(options.output) if options.output else None, run, header)

    def settings(cell: Cell) -> dict[str, Any]:
        prompts = sets[cell.set]
        common = {
            "prompts": len(prompts.ids),
            "prompts_sha256": prompts.sha256,
            "held_out_fraction": prompts.held_out_fraction,
        }
        # Neither decides which tokens come out, both decide how long they take.
        timed = {"num_slots": slots, "repeats": options.repeats}
        return common if cell.batch_size is None else {**common, **timed}

    missing = [cell for cell in cells if not results.has(cell, settings(cell))]
    console.print(
        f"{len(cells)} cells, {len(cells) - len(missing)} of them there; "
        + ", ".join(f"{name}: {len(prompts.ids)} prompts" for name, prompts in sets.items())
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("decoding", total=_work(missing, sets, options.repeats))

        def advance(count: int) -> None:
            bar.advance(task, count)

        if options.tau_only:
            batch = options.refill_batch_size
            batch = batch or (16 if jax.default_backend() == "cpu" else 128)
            measured = measure_acceptance(evaluation, missing, batch, advance)
        else:
            bandwidth = copy_bandwidth(2**28 if jax.default_backend() == "cpu" else 2**30)
            measured = measure_speed(evaluation, missing, options.repeats, bandwidth, advance)
        for cell, numbers in measured:
            results.add(cell, settings(cell), numbers)
            console.print(_line(cell, numbers))
    exact = dtype == "float32" and "highest" in (
        "highest" if hardware["backend"] == "cpu" else "",
        hardware["matmul_precision"],
    )
    chosen = [results.content["cells"][cell.key] for cell in cells]
    parted = sum(cell["identical"]["different"] for cell in chosen if "identical" in cell)
    if parted and exact:
        raise DFlashError(
            f"{parted} rows differ between plain and speculative decoding: this must not happen "
            "in float32"
        )
    return results.content


def _work(cells: Sequence[Cell], sets: dict[str, HeldOutSet], repeats: int) -> int:
    """Steps of the progress bar: prompts with --tau_only, else timed batches."""
    if not cells or cells[0].batch_size is None:
        return sum(len(sets[cell.set].ids) for cell in cells)
    plain = {(cell.set, cell.temperature, cell.batch_size) for cell in cells}
    ways = [*plain, *((cell.set, cell.temperature, cell.batch_size) for cell in cells)]
    return repeats * sum(-(-len(sets[name].ids) // rows) for name, _, rows in ways if rows)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _line(cell: Cell, numbers: dict[str, Any]) -> str:
    accepted = numbers["acceptance"]
    text = (
        f"{cell.key}: tau {_number(accepted['tau'])}, without the {accepted['looping']} of "
        f"{accepted['prompts']} that loop {_number(accepted['tau_other'])}"
    )
    if "comparison" in numbers:
        compared, same = numbers["comparison"], numbers["identical"]
        text += (
            f", speedup {compared['speedup']:.2f}x (a cycle costs "
            f"{compared['cycle_cost_in_steps']:.2f} plain steps), "
            f"identical {same['rows'] - same['different']} of {same['rows']}"
        )
        if same.get("margins"):
            text += (
                f", the others part at log-probabilities {max(same['margins']):.3f} apart or less"
            )
    return text


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    console = Console(highlight=False, soft_wrap=True)
    try:
        evaluate(flags.FLAGS, sys.argv[1:], console)
    except (DFlashError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
