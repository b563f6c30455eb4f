"""What prompts to train on must not contain: the HumanEval problems and other held-out prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

WORDS = 13  # in a row; the usual measure of contamination (GPT-3, arXiv 2005.14165, appendix C)
_NAMED = re.compile(r"(?:\bdef|\bfunction|\bnamed|\bcalled)\s+`?(\w+)|`(\w+)`")


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """All runs of `WORDS` words, lower case, without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


class Avoid:
    """Knows names of functions and runs of words; `reason` says what a text shares with them.

    Args:
      problems: `heldout.humaneval_problems()`, with `prompt` and `entry_point`.
      texts: held-out prompts.
    """

    def __init__(self, problems: Iterable[dict[str, Any]] = (), texts: Iterable[str] = ()):
        self.names: set[str] = set()
        self._problems: set[tuple[str, ...]] = set()
        self._texts: set[tuple[str, ...]] = set()
        self._whole: set[str] = set()
        for problem in problems:
            self.names.add(problem["entry_point"])
            self._problems |= runs_of_words(problem["prompt"])
        for text in texts:
            self._whole.add(text.strip())
            self._texts |= runs_of_words(text)

    def reason(self, text: str) -> str | None:
        """Why a prompt is not to be used, or None."""
        if any((a or b) in self.names for a, b in _NAMED.findall(text)):
            return "a function of HumanEval"
        if text.strip() in self._whole:
            return "a held-out prompt"
        runs = runs_of_words(text)
        if runs & self._problems:
            return f"{WORDS} words of HumanEval"
        if runs & self._texts:
            return f"{WORDS} words of a held-out prompt"
        return None
