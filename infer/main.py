"""Generates text from a command line:

    python -m infer.main --target=smollm2-135m-instruct --drafter=DIR --prompt="Why is it dark?"

The text is streamed; the same request is then run again as one device loop, and that is timed: the
rate covers the whole request, prefill included, without compilation and without the stop after
every cycle that streaming needs.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from dflash_jax.drafter import Drafter
from dflash_jax.generation import GenerationOutput, SamplingParams, make_request
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import Target
from infer.generate import with_text
from infer.prompts import Prompt, encode_prompt, has_chat_template
from infer.stream import stream
from infer.timing import timed_run, warm_up


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Adds this command's flags to `values`."""
    options: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string(
        "target", None, "Folder, hub id, .gguf file or alias of the target.", **options
    )
    flags.DEFINE_string(
        "drafter", None, "Folder or hub id; without one, plain decoding.", **options
    )
    flags.DEFINE_string("prompt", None, "The user's message, or plain text with --raw.", **options)
    flags.DEFINE_string("system", None, "System message.", **options)
    flags.DEFINE_boolean(
        "raw", False, "No chat template: the model continues the prompt.", **options
    )
    flags.DEFINE_boolean("enable_thinking", None, "Passed to the chat template.", **options)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", **options)
    flags.DEFINE_integer("top_k", 0, "0 is off.", **options)
    flags.DEFINE_float("top_p", 1.0, "1 is off.", **options)
    flags.DEFINE_integer("seed", 0, "The same seed gives the same text.", **options)
    flags.DEFINE_integer("max_new_tokens", 256, "Budget.", **options)
    flags.DEFINE_integer(
        "block_size", None, "Slots a cycle; by default the drafter's own.", **options
    )
    flags.DEFINE_enum(
        "draft_policy", "argmax", ["argmax", "coupled"], "How drafts are chosen.", **options
    )
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16"],
        "auto: float32 on a CPU, bfloat16 elsewhere.",
        **options,
    )
    flags.DEFINE_boolean(
        "compare_autoregressive", False, "Time plain decoding too and compare the ids.", **options
    )
    flags.DEFINE_boolean("json", False, "The last line of output is a JSON object.", **options)
    flags.mark_flags_as_required(["target", "prompt"], flag_values=values)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        return _fail(f"unknown arguments {list(argv[1:])}; is a flag missing its --?")
    logging.set_verbosity(logging.WARNING)  # jax reports every backend that is not there
    return run(flags.FLAGS)


def run(options: Any) -> int:
    """Runs the command with parsed flags; returns the exit status."""
    try:
        record = _generate(options)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    if options.json:
        print(json.dumps(_finite(record)), flush=True)
    return 0


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return 2


def _generate(options: Any) -> dict[str, Any]:
    """Loads, streams, times; returns the record that --json prints."""
    if options.compare_autoregressive and not options.drafter:
        raise ValueError("compare_autoregressive: a drafter is needed to compare with")
    sampling = SamplingParams(options.temperature, options.top_k, options.top_p, options.seed)
    target = load_target(options.target, dtype=options.dtype)
    drafter = None
    if options.drafter:
        drafter = load_drafter(options.drafter, target, dtype=options.dtype)
    ids = encode_prompt(target, _prompt(target, options), options.enable_thinking)
    request = {"sampling": sampling, "max_new_tokens": options.max_new_tokens}
    drafting = {"block_size": options.block_size, "draft_policy": options.draft_policy}

    for piece in stream(target, drafter, ids, **request, **drafting):
        print(piece, end="", flush=True)
    print(flush=True)

    output, rate = _timed(target, drafter, ids, **request, **drafting)
    text = with_text(target, output).text
    record: dict[str, Any] = {
        "text": text[0] if text else None,
        "token_ids": output.token_ids[0],
        "acceptance_lengths": output.acceptance_lengths[0],
        "mean_acceptance_length": output.mean_acceptance_length,
        "tokens_per_second": rate,
        "finish_reason": output.finish_reasons[0],
        "prompt_tokens": len(ids),
    }
    if options.compare_autoregressive:
        plain, plain_rate = _timed(target, None, ids, **request)
        record["plain_tokens_per_second"] = plain_rate
        record["identical"] = plain.token_ids == output.token_ids
    _print_summary(record, speculative=drafter is not None)
    return record


def _prompt(target: Target, options: Any) -> Prompt:
    """Chat messages where the target has a template and --raw is off, else the text itself."""
    if not options.raw and has_chat_template(target):
        system = [{"role": "system", "content": options.system}] if options.system else []
        return [*system, {"role": "user", "content": options.prompt}]
    if options.system:
        why = "--raw is given" if options.raw else "the target has no chat template"
        raise ValueError(f"system: a system message needs the chat template, but {why}")
    return options.prompt


def _timed(
    target: Target, drafter: Drafter | None, ids: list[int], **request: Any
) -> tuple[GenerationOutput, float]:
    """Result and tokens a second of the whole request, compiled beforehand."""
    prepared = make_request(target, drafter, [ids], **request)
    warm_up(prepared)
    timed = timed_run(prepared)
    return timed.output, timed.tokens_per_second


def _print_summary(record: Mapping[str, Any], speculative: bool) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    rows = [
        ("tokens", f"{len(record['token_ids'])} ({record['finish_reason']})"),
        ("tokens/s", f"{record['tokens_per_second']:.1f} (without compilation)"),
    ]
    if "plain_tokens_per_second" in record:
        plain = record["plain_tokens_per_second"]
        rows += [
            ("plain tokens/s", f"{plain:.1f}"),
            ("speedup", f"{record['tokens_per_second'] / plain:.2f}x" if plain else "-"),
            ("identical", "yes" if record["identical"] else "NO"),
        ]
    if speculative:
        tau = record["mean_acceptance_length"]
        cycles = len(record["acceptance_lengths"])
        rows.append(("tau", f"{tau:.2f} tokens a cycle, {cycles} cycles"))
    console.print()
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    if speculative and record["acceptance_lengths"]:
        console.print(_histogram(record["acceptance_lengths"]))


def _histogram(lengths: Sequence[int]) -> Table:
    """Cycles by acceptance length."""
    table = Table(box=None, padding=(0, 2), title="acceptance lengths", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("cycles", justify="right")
    table.add_column("")
    counts = Counter(lengths)
    widest = max(counts.values())
    for length in range(1, max(counts) + 1):
        bar = "#" * math.ceil(40 * counts[length] / widest)
        table.add_row(str(length), str(counts[length]), bar)
    return table


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """NaN (tau without a cycle) becomes null: JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


if __name__ == "__main__":
    define_flags()
    app.run(main)
