"""Answers of the target to prompts of conversation files: the responses a drafter is trained on.

The output is the regenerated form of `data.py`, one JSON line a prompt, appended as rows finish. A
run that is stopped anywhere is taken up where it was: a prompt's answer depends on the prompt, its
seed and the target alone, so nothing is lost, doubled or different.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.drafter import Drafter
from dflash_jax.errors import DFlashError
from dflash_jax.generation import SamplingParams, default_prefill_chunk, slot_bucket
from dflash_jax.refill import Job, generate_many
from dflash_jax.target import Target
from train.chat import ChatFormat
from train.conversations import (
    Conversation,
    ReadReport,
    Selector,
    prompts,
    read_conversations,
    resolve_path,
    select,
)
from train.locks import only_writer
from train.repetition import is_looping


class RegenerateError(DFlashError):
    """The output file does not belong to this run, or is damaged in its middle."""


def _setting(default: Any, doc: str) -> Any:
    """A field whose text is also its flag's."""
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclasses.dataclass(frozen=True)
class RegenerateSettings:
    """What decides the rows; a file is continued only by the same settings."""

    temperature: float = _setting(0.0, "Of sampling; 0 is greedy.")
    top_k: int = _setting(0, "Most likely tokens to sample from; 0 = all.")
    top_p: float = _setting(1.0, "Share of probability to sample from; 1 = all.")
    seed: int = _setting(0, "A prompt's own seed follows from this one and its id.")
    max_new_tokens: int = _setting(512, "Budget of a response.")
    max_prompt_tokens: int = _setting(512, "Longer prompts are left out, and counted.")
    every_user_turn: bool = _setting(
        False, "Answer the prompts up to each user turn instead of the first only."
    )
    held_out_fraction: float = _setting(
        0.0, "Share of prompts that is held out; 0 = answer all, for training splits them itself."
    )
    held_out: bool = _setting(False, "Which side of that split to answer.")
    num_prompts: int = _setting(0, "Stop after so many prompts; 0 = all.")

    def sampling(self, prompt_id: str) -> SamplingParams:
        """Sampling of one prompt, the same at every run."""
        digest = hashlib.sha256(f"{self.seed}:{prompt_id}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        return SamplingParams(self.temperature, self.top_k, self.top_p, seed)


@dataclasses.dataclass
class RegenerateReport(ReadReport):
    """Counts of a run. Attributes:
    already: prompts that the file had answered before.
    too_long: prompts left out for their length.
    answered, tokens, looping: of this run; `looping` responses end in a repetition.
    seconds: from the first prompt to the last answer, compilation included.
    """

    already: int = 0
    too_long: int = 0
    answered: int = 0
    tokens: int = 0
    looping: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.answered} prompts answered with {self.tokens} tokens in {self.seconds:.0f} s "
            f"({self.tokens / max(self.seconds, 1e-9):.0f} tokens/s); {self.already} were there",
            f"{self.looping} of them end in a loop; {self.too_long} prompts were too long",
        ]
        lines += [f"left out: {count} {reason}" for reason, count in self.unusable.most_common()]
        return "\n".join([*lines, *self.broken])


def recover(path: Path) -> list[dict[str, Any]]:
    """The rows of an output file; a last line cut short by a kill is removed from the file.

    Raises:
      RegenerateError: a line is not a row, or the last not the beginning of one, with its number;
        the file is left as it is.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            row["id"], row["response_ids"]
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path}: line {number} is not a regenerated row ({error})"
            raise RegenerateError(message) from None
        rows.append(row)
    tail = content[len(whole) :]
    if not tail:
        return rows
    if not _begins_a_row(tail):  # of another file: nothing of it may be lost
        raise RegenerateError(
            f"{path}: line {len(rows) + 1}, the last, is not the beginning of a regenerated row: "
            f"{tail[:40]!r}; choose another file"
        )
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return rows


def _begins_a_row(text: bytes) -> bool:
    """Whether `regenerate` writes a line that goes on like this."""
    start, after = b'{"id": "', b'", "prompt_ids": ['
    if len(text) <= len(start):
        return start.startswith(text)
    if not text.startswith(start):
        return False
    key = re.match(rb'(?:[^"\\]|\\.)*', text[len(start) :], re.DOTALL)
    assert key is not None  # it may be empty
    rest = text[len(start) + key.end() :]
    return rest in (b"", b"\\") or after.startswith(rest) or rest.startswith(after)


def _check_row(
    row: dict[str, Any], target: Target, settings: RegenerateSettings, path: Path
) -> None:
    expected = {
        "target": target.name,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.sampling(row["id"]).seed,
        "max_new_tokens": settings.max_new_tokens,
    }
    off = {"top_k": 0, "top_p": 1.0}  # rows of other writers may leave these out
    for field, value in expected.items():
        if row.get(field, off.get(field)) != value:
            raise RegenerateError(
                f"{path}: row {row['id']} has {field} {row.get(field)!r}, this run {value!r}; "
                "continue with the same settings or choose another file"
            )


def regenerate(
    target: Target,
    files: list[str],
    out: str | Path,
    settings: RegenerateSettings,
    *,
    drafter: Drafter | None = None,
    batch_size: int = 16,
    enable_thinking: bool | None = None,
    on_truncation: str = "keep",
    progress: Callable[[RegenerateReport], None] = lambda report: None,
) -> RegenerateReport:
    """Answers the prompts that `out` does not have yet, appending to it.

    Args:
      files: conversation files or aliases.
      drafter: decode speculatively; the answers are the same.
      progress: called after every answer.

    Raises:
      RegenerateError: `out` belongs to other settings or is damaged.
      BusyError: another process is writing it.
      ValueError: no tokenizer with a chat template, or a bad file.
    """
    out = Path(out)
    for source_file in files:
        if out.exists() and out.samefile(resolve_path(source_file)):
            raise RegenerateError(f"{out}: holds the prompts; choose another file for the answers")
    out.parent.mkdir(parents=True, exist_ok=True)
    chat = ChatFormat(target.tokenizer, enable_thinking, target.stop_token_ids or None)
    with only_writer(out.with_name(out.name + ".lock"), out):
        return _continue(
            target, files, out, settings, drafter, batch_size, chat, on_truncation, progress
        )


def _continue(
    target: Target,
    files: list[str],
    out: Path,
    settings: RegenerateSettings,
    drafter: Drafter | None,
    batch_size: int,
    chat: ChatFormat,
    on_truncation: str,
    progress: Callable[[RegenerateReport], None],
) -> RegenerateReport:
    done = recover(out)
    for row in done:
        _check_row(row, target, settings, out)
    known = {row["id"]: row.get("prompt_ids") for row in done}
    if len(known) < len(done):
        raise RegenerateError(f"{out}: {len(done)} rows have only {len(known)} different ids")
    report = RegenerateReport()
    source: dict[str, Conversation] = {}

    def jobs() -> Iterator[Job]:
        taken = 0
        times_seen: Counter[str] = Counter()
        for prompt in _prompts(files, settings, on_truncation, report):
            if settings.num_prompts and taken >= settings.num_prompts:
                return
            ids = chat.prompt_ids(prompt.messages, prompt.tools)
            if len(ids) > settings.max_prompt_tokens:
                report.too_long += 1
                continue
            taken += 1
            times_seen[prompt.id] += 1
            key = prompt.id
            if times_seen[key] > 1:  # another prompt of that id, in this file or the next
                key = f"{key}#{times_seen[key]}"
            if key in known:
                if known[key] != ids:
                    raise RegenerateError(
                        f"{out}: row {key} answers another prompt than this run's of that id: "
                        f"prompt_ids {_ends(known[key])}, here {_ends(ids)}; another prompt file, "
                        "chat template or thinking mode? Choose another file"
                    )
                report.already += 1
                continue
            source[key] = prompt
            yield Job(key, ids, settings.sampling(key), settings.max_new_tokens)

    chunk = default_prefill_chunk()
    block = drafter.config.block_size if drafter is not None else 1
    slots = slot_bucket(settings.max_prompt_tokens + settings.max_new_tokens + block, chunk)
    start = time.perf_counter()
    with out.open("a", encoding="utf-8") as file:
        for job, output in generate_many(
            target, drafter, jobs(), batch_size=batch_size, num_slots=slots
        ):
            response = output.token_ids[0]
            row = {
                "id": job.key,
                "prompt_ids": list(job.prompt_ids),
                "response_ids": response,
                "finish_reason": output.finish_reasons[0],
                "temperature": settings.temperature,
                "top_k": settings.top_k,
                "top_p": settings.top_p,
                "seed": job.sampling.seed,
                "max_new_tokens": job.max_new_tokens,
                "messages": source.pop(job.key).messages,
                "target": target.name,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            report.answered += 1
            report.tokens += len(response)
            report.looping += is_looping(response)
            report.seconds = time.perf_counter() - start
            progress(report)
    return report


def _ends(ids: Any) -> str:
    return f"{len(ids)} ids ending in {ids[-4:]}" if isinstance(ids, list) else repr(ids)


def _prompts(
    files: list[str], settings: RegenerateSettings, on_truncation: str, report: RegenerateReport
) -> Iterator[Conversation]:
    """Prompts in file order, without repeats and of one side of the split."""
    selector = Selector(settings.held_out_fraction, settings.held_out)
    for file in files:
        read = read_conversations(
            file, need_assistant=False, on_truncation=on_truncation, report=report
        )
        cut = (
            prompt
            for conversation in read
            for prompt in prompts(conversation, every_user_turn=settings.every_user_turn)
        )
        yield from select(cut, selector, report)
