"""Writes prompts made by rule, as conversations for scripts/regenerate.py.

    python scripts/make_prompts.py --out=data/prompts --count=3000

One JSONL file a family: completion, coding, arithmetic, rewriting. The same seed, Python version
and files give the same prompts. Held-out sets (train/heldout.py) stay out: no prompt shares a
function's name or 13 words in a row with HumanEval, or 13 words with the word problems or the
conversations of `--held_out`, and no sentence comes from the held-out side of `--sentences`.
"""

import sys
from pathlib import Path

from absl import app, flags

from train.conversations import (
    ConversationFileError,
    first_user_text,
    read_conversations,
)
from train.heldout import HELD_OUT_FRACTION, humaneval_problems
from train.prompts import rewriting
from train.prompts.avoid import Avoid
from train.prompts.families import FAMILIES, choose, family_texts, write
from train.word_problems import word_problems

_OUT = flags.DEFINE_string("out", None, "Folder to write to.", required=True)
_FAMILIES = flags.DEFINE_list("families", list(FAMILIES), "Which ones.")
_COUNT = flags.DEFINE_integer("count", 3000, "Prompts a family, at most.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the order and the wordings.", lower_bound=0)
_SENTENCES = flags.DEFINE_list(
    "sentences", ["sharegpt"], "Conversation files whose user turns are rewritten; empty for none."
)
_FRACTION = flags.DEFINE_float(
    "held_out_fraction", HELD_OUT_FRACTION, "Share of the sentences' conversations to leave out."
)
_HELD_OUT = flags.DEFINE_list("held_out", [], "More conversation files to stay away from.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = [name for name in _FAMILIES.value if name not in FAMILIES]
    if unknown:
        raise app.UsageError(f"families: {unknown} are not among {list(FAMILIES)}")
    try:
        problems = humaneval_problems()
        held_out = [problem.text for problem in word_problems()]
        held_out += [
            first_user_text(conversation.messages)
            for file in _HELD_OUT.value
            for conversation in read_conversations(file, need_assistant=False)
        ]
        avoid = Avoid(problems, held_out)
        runs: list[list[str]] = []
        for file in _SENTENCES.value if "rewriting" in _FAMILIES.value else []:
            read = read_conversations(file, need_assistant=False, on_truncation="keep")
            runs += [
                run
                for run in rewriting.sentences(read, _FRACTION.value)
                if not avoid.reason("\n".join(run))
            ]
        print(f"avoided: {len(problems)} HumanEval problems, {len(held_out)} held-out prompts")
        for family in _FAMILIES.value:
            texts, left_out = choose(family_texts(family, _SEED.value, runs), _COUNT.value, avoid)
            path = Path(_OUT.value) / f"{family}.jsonl"
            write(path, family, texts)
            counts = "".join(f"; left out, {why}: {n}" for why, n in left_out.most_common())
            print(f"{path}: {len(texts)} prompts{counts}")
    except (ConversationFileError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
