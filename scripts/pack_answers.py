"""Packs regenerated answers into one `.npz` file, a tenth of their size, that trains like them.

    python scripts/pack_answers.py data/greedy.jsonl data/sampled.jsonl --out=data/answers.npz \\
        --target=smollm2-135m-instruct

With `--target`, each prompt is verified against the target's chat template, which the file then
names: the messages are left out, so nobody can check that later. Without it, training reports that
the template is unknown. `--held_out_fraction=0.05` packs the rows to train on, and with
`--held_out` those to evaluate on (`data.eval`).
"""

import os
import sys

from absl import app, flags, logging

from dflash_jax.errors import DFlashError
from dflash_jax.loading import load_target
from train.chat import ChatFormat
from train.conversations import ConversationFileError
from train.packed import pack

_OUT = flags.DEFINE_string("out", None, "File to write.", required=True)
_TARGET = flags.DEFINE_string("target", None, "Folder, hub id, GGUF or alias, to verify prompts.")
_FRACTION = flags.DEFINE_float(
    "held_out_fraction", 0.0, "Leave out this share of the prompts.", lower_bound=0, upper_bound=1
)
_HELD_OUT = flags.DEFINE_bool("held_out", False, "Pack that share instead of the others.")
_THINKING = flags.DEFINE_bool("enable_thinking", None, "Passed to the chat template.")


def main(argv: list[str]) -> None:
    files = argv[1:]
    if not files:
        raise app.UsageError("which files? python scripts/pack_answers.py IN.jsonl... --out=X.npz")
    if not flags.FLAGS["verbosity"].present:  # jax reports every backend it does not find
        logging.set_verbosity(logging.WARNING)
    try:
        chat = None
        if _TARGET.value:
            target = load_target(_TARGET.value)
            chat = ChatFormat(target.tokenizer, _THINKING.value, target.stop_token_ids or None)
        rows, tokens = pack(files, _OUT.value, chat, _FRACTION.value, _HELD_OUT.value)
    except (DFlashError, ConversationFileError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    before, after = sum(os.path.getsize(file) for file in files), os.path.getsize(_OUT.value)
    verified = "prompts verified" if chat else "prompts not verified, template not recorded"
    print(
        f"{_OUT.value}: {rows} rows, {tokens} response tokens, {after / 1e6:.1f} MB for "
        f"{before / 1e6:.1f} MB of JSONL; {verified}"
    )


if __name__ == "__main__":
    app.run(main)
