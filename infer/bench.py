"""Measures plain and speculative decoding in one run, on the same prompts and cache sizes:

    python -m infer.bench --target=smollm2-135m-instruct --drafter=DIR --output=results.json
    python -m infer.bench --random_weights=qwen3_8b --synthetic_acceptance=5 --context=2048

Compilation and warm-up runs are left out; each number is the median over the repeats. The loop is
waited for once, at its end. A cycle that costs c plain steps pays from an acceptance length of c on
(break-even). The floor is the bytes of weights that a step must read over the copy bandwidth
measured in the same run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from dflash_jax.drafter import Drafter
from dflash_jax.generation import (
    CustomDrafter,
    Request,
    SamplingParams,
    make_request,
)
from dflash_jax.target import Target
from infer.bench_inputs import RANDOM, load_models, load_prompts
from infer.bench_report import environment, print_results
from infer.comparison import (
    compare,
    count_identical,
    fill_batches,
    margins_where_parted,
    summarize,
)
from infer.synthetic import synthetic_drafter
from infer.timing import (
    TimedRun,
    copy_bandwidth,
    cycle_weight_bytes,
    matmul_rate,
    step_weight_bytes,
    timed_run,
    warm_up,
)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Adds this command's flags to `values`."""
    options: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string(
        "target", None, "Folder, hub id, .gguf file or alias of the target.", **options
    )
    flags.DEFINE_string("drafter", None, "Folder or hub id; none: plain only.", **options)
    flags.DEFINE_enum(
        "random_weights", None, RANDOM, "Random target and drafter of this size.", **options
    )
    flags.DEFINE_string(
        "prompt_file",
        None,
        "Prompts, one a line; .jsonl: objects with `prompt` (text or ids) or `messages`.",
        **options,
    )
    flags.DEFINE_integer("prompt_length", 128, "Tokens, with --random_weights.", **options)
    flags.DEFINE_integer("batch_size", 1, "Rows of a batch.", **options)
    flags.DEFINE_integer("max_new_tokens", 256, "Budget of a row.", **options)
    flags.DEFINE_integer(
        "context", None, "Cache slots a row; by default the smallest that fit.", **options
    )
    flags.DEFINE_integer(
        "block_size", None, "Slots a cycle; by default the drafter's own.", **options
    )
    flags.DEFINE_enum(
        "draft_policy", "argmax", ["argmax", "coupled"], "How drafts are chosen.", **options
    )
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", **options)
    flags.DEFINE_integer("seed", 0, "Of sampling, random weights and schedules.", **options)
    flags.DEFINE_integer("repeats", 3, "Timed runs.", lower_bound=1, **options)
    flags.DEFINE_integer("warmup", 1, "Whole runs before, not timed.", lower_bound=0, **options)
    flags.DEFINE_float(
        "synthetic_acceptance",
        None,
        "Force this mean acceptance length, to measure costs; the text is then not the target's.",
        **options,
    )
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16"],
        "auto: float32 on a CPU, bfloat16 elsewhere.",
        **options,
    )
    flags.DEFINE_string("output", None, "File for the results as JSON.", **options)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        return _fail(f"unknown arguments {list(argv[1:])}; is a flag missing its --?")
    logging.set_verbosity(logging.WARNING)  # jax reports every backend that is not there
    return run(flags.FLAGS, sys.argv)


def run(options: Any, command: Sequence[str]) -> int:
    """Runs the command with parsed flags; returns the exit status."""
    try:
        if options.output and not Path(options.output).parent.is_dir():
            raise ValueError(f"output: {Path(options.output).parent} is not a folder")
        results = {"command": ["python", "-m", "infer.bench", *command[1:]], **benchmark(options)}
        print_results(results)
        if options.output:
            Path(options.output).write_text(json.dumps(results, indent=2) + "\n")
    except (ValueError, OSError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return 2


def benchmark(options: Any) -> dict[str, Any]:
    """Loads, measures and returns the results as a JSON-ready dict.

    Raises:
      ValueError: options that do not fit each other, the models or the prompts.
    """
    target, drafter = load_models(options)
    prompts = load_prompts(options, target)
    synthetic = options.synthetic_acceptance
    proposer: Drafter | CustomDrafter | None = drafter
    if synthetic is not None:
        if drafter is None:
            raise ValueError("synthetic_acceptance: a drafter (or --random_weights) is needed")
        proposer = synthetic_drafter(
            drafter, synthetic, options.block_size, options.seed, options.draft_policy
        )
    batches = fill_batches(prompts, options.batch_size)
    plain, speculative = _requests(options, target, proposer, batches)

    for requests in (plain, speculative):
        if requests:
            warm_up(requests[0])
        for _ in range(options.warmup):
            for request in requests:
                timed_run(request)
    plain_runs: list[list[TimedRun]] = []
    speculative_runs: list[list[TimedRun]] = []
    for _ in range(options.repeats):  # alternating, so that a drift of the clock hits both
        plain_runs.append([timed_run(request) for request in plain])
        speculative_runs.append([timed_run(request) for request in speculative])

    dtype = target.model.dtype
    cpu = jax.default_backend() == "cpu"
    bandwidth = copy_bandwidth(2**28 if cpu else 2**30)
    rows = options.batch_size
    results: dict[str, Any] = {
        **environment(),
        "config": {
            "target": target.name,
            "drafter": options.drafter or ("random" if drafter else None),
            "dtype": jnp.dtype(dtype).name,
            "batch_size": rows,
            "batches": len(batches),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "max_new_tokens": options.max_new_tokens,
            "context": plain[0].tokens_BS.shape[1],
            "block_size": speculative[0].spec.block_size if speculative else None,
            "draft_policy": options.draft_policy,
            "temperature": options.temperature,
            "seed": options.seed,
            "repeats": options.repeats,
            "warmup": options.warmup,
        },
        "synthetic_acceptance": synthetic,
        "device": {
            "copy_bytes_per_second": bandwidth,
            "matmul_flops_per_second": matmul_rate(1024 if cpu else 8192, dtype),
        },
        "plain": summarize(plain_runs, step_weight_bytes(target, rows), bandwidth),
    }
    if speculative:
        assert drafter is not None
        tokens = rows * speculative[0].spec.block_size
        weight_bytes = cycle_weight_bytes(target, drafter, tokens)
        results["speculative"] = summarize(speculative_runs, weight_bytes, bandwidth)
        results["comparison"] = compare(results["plain"], results["speculative"])
        if synthetic is None:
            results["identical"] = count_identical(plain_runs[0], speculative_runs[0])
            if results["identical"]["different"] and options.temperature == 0:
                results["identical"]["margins"] = margins_where_parted(plain, speculative)
    return results


def _requests(
    options: Any,
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    batches: list[list[list[int]]],
) -> tuple[list[Request], list[Request]]:
    """Plain and speculative requests of all batches, with one cache size for all of them."""
    common = {
        "sampling": SamplingParams(temperature=options.temperature, seed=options.seed),
        "max_new_tokens": options.max_new_tokens,
    }
    drafting = {"block_size": options.block_size, "draft_policy": options.draft_policy}

    def requests(proposer: Any, slots: int | None) -> list[Request]:
        extra = {} if proposer is None else drafting
        return [
            make_request(target, proposer, batch, **common, **extra, num_slots=slots)
            for batch in batches
        ]

    slots = options.context or max(r.tokens_BS.shape[1] for r in requests(drafter, None))
    speculative = [] if drafter is None else requests(drafter, slots)
    if speculative and speculative[0].spec.proposer is None:
        raise ValueError("block_size: 1 is plain decoding; nothing to compare")
    return requests(None, slots), speculative


if __name__ == "__main__":
    define_flags()
    app.run(main)
