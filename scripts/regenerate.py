"""Lets the target answer prompts: the responses that its drafter is then trained on.

    python scripts/regenerate.py --target=smollm2-135m-instruct --prompts=sharegpt \\
        --out=data/smollm2_135m.jsonl --num_prompts=1000 --max_new_tokens=256

Run again, it continues: answered prompts stay, the others follow.
"""

import dataclasses
import os
import sys
from typing import Any

from absl import app, flags, logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_jax.errors import DFlashError
from dflash_jax.loading import load_drafter, load_target
from train.conversations import ConversationFileError
from train.regenerate import RegenerateReport, RegenerateSettings, regenerate

_TARGET = flags.DEFINE_string("target", None, "Folder, hub id, GGUF or alias.", required=True)
_DRAFTER = flags.DEFINE_string("drafter", None, "Decode speculatively; the answers are the same.")
_PROMPTS = flags.DEFINE_list(
    "prompts", ["sharegpt"], "Conversation files or aliases, one after the other: a.jsonl,b.jsonl"
)
_OUT = flags.DEFINE_string("out", None, "JSONL file to write or continue.", required=True)
_BATCH = flags.DEFINE_integer("batch_size", 16, "Prompts decoded together.", lower_bound=1)
_THINKING = flags.DEFINE_bool("enable_thinking", None, "Passed to the chat template.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Of the target.")
_BROKEN = flags.DEFINE_enum(
    "on_truncation", "error", ["error", "keep"], "Keep the good records of a broken file?"
)
_DEFINE: dict[type, Any] = {
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    bool: flags.DEFINE_bool,
}
_SETTINGS = {
    field.name: _DEFINE[type(field.default)](field.name, field.default, field.metadata["doc"])
    for field in dataclasses.fields(RegenerateSettings)
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:  # jax reports every backend it does not find
        logging.set_verbosity(logging.WARNING)
    settings = RegenerateSettings(**{name: flag.value for name, flag in _SETTINGS.items()})
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
    )
    try:
        target = load_target(_TARGET.value, dtype=_DTYPE.value)
        drafter = load_drafter(_DRAFTER.value, target) if _DRAFTER.value else None
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("answering", total=settings.num_prompts or None, rate=0.0)

            def show(report: RegenerateReport) -> None:
                rate = report.tokens / max(report.seconds, 1e-9)
                bar.update(task, completed=report.already + report.answered, rate=rate)

            report = regenerate(
                target,
                _PROMPTS.value,
                _OUT.value,
                settings,
                drafter=drafter,
                batch_size=_BATCH.value,
                enable_thinking=_THINKING.value,
                on_truncation=_BROKEN.value,
                progress=show,
            )
            show(report)
    except (DFlashError, ConversationFileError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    console.print(f"{os.path.relpath(_OUT.value)}: {report}")


if __name__ == "__main__":
    app.run(main)
