"""The families by name: their texts, a choice of them, and the files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from train.prompts import arithmetic, coding, completion, rewriting
from train.prompts.avoid import Avoid

FAMILIES = ("completion", "coding", "arithmetic", "rewriting")
_TRIES = 20  # texts looked at for each one wanted, before a family counts as exhausted


def family_texts(name: str, seed: int, runs: list[list[str]]) -> Iterator[str]:
    """The texts of a family, in the order that the seed decides."""
    rng = random.Random(f"{seed}:{name}")
    if name == "rewriting":
        return rewriting.texts(rng, runs)
    return {"completion": completion, "coding": coding, "arithmetic": arithmetic}[name].texts(rng)


def choose(texts: Iterator[str], count: int, avoid: Avoid) -> tuple[list[str], Counter[str]]:
    """The first `count` different texts that `avoid` lets pass, and what was left out and why."""
    chosen: dict[str, None] = {}
    left_out: Counter[str] = Counter()
    for tried, text in enumerate(texts):
        if len(chosen) >= count or tried >= count * _TRIES:
            break
        if text in chosen:
            left_out["repeated"] += 1
        elif reason := avoid.reason(text):
            left_out[reason] += 1
        else:
            chosen[text] = None
    return list(chosen), left_out


def write(path: Path, family: str, texts: list[str]) -> None:
    """One conversation a line; ids are `family/number`."""
    rows = (
        {"id": f"{family}/{i:06d}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
