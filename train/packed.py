"""Regenerated answers as one small `.npz` file: a tenth of the JSONL, for data sets to keep.

Arrays, of N rows:

    ids               uint16 or uint32, prompts and responses of all rows one after the other
    prompt_lengths    uint32 [N]
    response_lengths  uint32 [N]
    stopped           bool [N], finish_reason "stop" (else "length")
    seeds             uint32 [N]
    settings          uint16 [N], index into the meta's `settings`
    split_keys        uint64 [N], `conversations.split_key` of the prompt: messages are not kept,
                      and a row stays on its side of a held-out split
    record_ids, meta  uint8, JSON: the rows' ids; {"form", "target", "settings", "template"}

`template` is `ChatFormat.fingerprint` of the template that the prompts were verified to come from,
or null: then a reader cannot tell whether its own template is the same.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.chat import ChatFormat
from train.conversations import ConversationFileError, is_held_out, read_rows, split_key
from train.regenerated import NEEDED, check_row, split_text

FORM = "dflash-jax answers 1"
_SETTINGS: dict[str, Any] = {  # with the value of rows that do not state it
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_new_tokens": None,
}
_TYPES = {
    "ids": (np.uint16, np.uint32),
    "prompt_lengths": (np.uint32,),
    "response_lengths": (np.uint32,),
    "stopped": (np.bool_,),
    "seeds": (np.uint32,),
    "settings": (np.uint16,),
    "split_keys": (np.uint64,),
    "record_ids": (np.uint8,),
    "meta": (np.uint8,),
}


class PackedFileError(ConversationFileError):
    """A packed file that is damaged, or rows that cannot be packed."""


@dataclass(frozen=True)
class Packed:
    """A packed file in memory.

    Attributes:
      path: for messages.
      meta, record_ids, arrays: see the module.
    """

    path: Path
    meta: dict[str, Any]
    record_ids: list[str]
    arrays: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.record_ids)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Regenerated rows as in JSONL (`train.data`), with `split_key` in place of `messages`."""
        a = self.arrays
        ends = np.cumsum(a["prompt_lengths"].astype(np.int64) + a["response_lengths"])
        for i, id in enumerate(self.record_ids):
            first = int(ends[i - 1]) if i else 0
            middle = first + int(a["prompt_lengths"][i])
            stated = self.meta["settings"][a["settings"][i]].items()
            yield {
                "id": id,
                "prompt_ids": a["ids"][first:middle].tolist(),
                "response_ids": a["ids"][middle : ends[i]].tolist(),
                "finish_reason": "stop" if a["stopped"][i] else "length",
                **{name: value for name, value in stated if value is not None},
                "seed": int(a["seeds"][i]),
                "target": self.meta["target"],
                "split_key": int(a["split_keys"][i]),
            }


def is_packed(path: str | Path) -> bool:
    """Whether a file is packed, by its first bytes."""
    with Path(path).open("rb") as stream:
        return stream.read(2) == b"PK"


def read_packed(path: str | Path) -> Packed:
    """Reads and checks a whole file; zip checksums cover every array.

    Raises:
      PackedFileError: the file is damaged or of another form, with the reason.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:  # of a broken file, NumPy would leave its own stream open
            if not zipfile.is_zipfile(stream):  # and of a stump, advise to load pickled data
                raise zipfile.BadZipFile("not a whole zip file")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in _TYPES}
        meta, record_ids = (json.loads(arrays.pop(n).tobytes()) for n in ("meta", "record_ids"))
        problem = _problem(meta, record_ids, arrays)
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise PackedFileError(f"{path}: cannot be read as packed answers: {error}") from error
    if problem:
        raise PackedFileError(f"{path}: {problem}")
    return Packed(path, meta, record_ids, arrays)


def _problem(meta: Any, record_ids: Any, arrays: dict[str, np.ndarray]) -> str | None:
    """What is wrong with a file that could be read."""
    if not isinstance(meta, dict) or meta.get("form") != FORM:
        return f"meta is not of the form {FORM!r}"
    if not isinstance(meta.get("target"), str) or "template" not in meta:
        return f"meta has no target or no template: {meta!r:.80}"
    settings = meta.get("settings")
    if not isinstance(settings, list) or not all(isinstance(s, dict) for s in settings):
        return f"meta's settings are not a list of objects: {settings!r:.80}"
    if not isinstance(record_ids, list):
        return "record_ids is not a list"
    for name, array in arrays.items():
        if array.dtype not in _TYPES[name] or array.ndim != 1:
            return f"{name} is {array.dtype} {array.shape}"
        if name != "ids" and len(array) != len(record_ids):
            return f"{name} has {len(array)} rows, record_ids {len(record_ids)}"
    count = int(arrays["prompt_lengths"].sum(dtype=np.int64))
    count += int(arrays["response_lengths"].sum(dtype=np.int64))
    if count != len(arrays["ids"]):
        return f"ids has {len(arrays['ids'])} entries, the lengths sum to {count}"
    known = len(meta["settings"])
    if len(record_ids) and arrays["settings"].max() >= known:
        return f"settings has the index {arrays['settings'].max()}, meta has {known} settings"
    return None


def pack(
    files: Iterable[str | Path],
    out: str | Path,
    chat: ChatFormat | None = None,
    held_out_fraction: float = 0.0,
    held_out: bool = False,
) -> tuple[int, int]:
    """Writes the regenerated rows of JSONL files, in order, as one packed file.

    Args:
      out: written whole or not at all.
      chat: renders each row's messages to verify its prompt, and leaves its fingerprint in the
        file; None: unverified.
      held_out_fraction, held_out: which side of that split of the prompts to take.

    Returns:
      Rows, and response tokens.

    Raises:
      ConversationFileError: `out` is one of the files, or an input is packed already; no row at
        all; or a row that is not regenerated, of another target than the first one's, or rendered
        by another template than `chat`'s, with file and row.
    """
    paths, out = [Path(file) for file in files], Path(out)
    if out.is_dir():
        raise PackedFileError(f"{out}: a folder, not a file to write")
    for path in paths:
        if out.exists() and path.exists() and out.samefile(path):
            raise PackedFileError(f"{path}: is both to be read and to be written")
        if is_packed(path):
            raise PackedFileError(f"{path}: is packed already")
    ids: list[np.ndarray] = []
    columns: dict[str, list[Any]] = {n: [] for n in _TYPES if n not in ("ids", "meta")}
    settings: list[dict[str, Any]] = []
    target: str | None = None
    for path in paths:
        for index, row in enumerate(read_rows(path)):
            where = f"{path}: row {index}"
            _check_row(row, where, chat)
            target = row["target"] if target is None else target
            if row["target"] != target:
                raise PackedFileError(f"{where}: target {row['target']!r}, before it {target!r}")
            key = split_key(split_text(row))
            if is_held_out(key, held_out_fraction) != held_out:
                continue
            chosen = {name: row.get(name, off) for name, off in _SETTINGS.items()}
            if chosen not in settings:
                settings.append(chosen)
            prompt, response = row["prompt_ids"], row["response_ids"]
            ids.append(np.array([*prompt, *response], np.uint32))
            columns["record_ids"].append(str(row["id"]))
            columns["prompt_lengths"].append(len(prompt))
            columns["response_lengths"].append(len(response))
            columns["stopped"].append(row["finish_reason"] == "stop")
            columns["seeds"].append(row.get("seed", 0))
            columns["settings"].append(settings.index(chosen))
            columns["split_keys"].append(key)
    if not ids:
        side = "held out" if held_out else "to train on"
        raise PackedFileError(f"no rows to pack ({side}, held_out_fraction {held_out_fraction})")
    flat = np.concatenate(ids)
    template = None if chat is None else chat.fingerprint()
    meta = {"form": FORM, "target": target, "settings": settings, "template": template}
    arrays = {
        "ids": flat.astype(np.uint16 if flat.max() < 2**16 else np.uint32),
        "meta": _json_bytes(meta),
        "record_ids": _json_bytes(columns.pop("record_ids")),
        **{name: np.array(values, _TYPES[name][0]) for name, values in columns.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    os.replace(temporary, out)
    return len(ids), int(arrays["response_lengths"].sum(dtype=np.int64))


def _check_row(row: Any, where: str, chat: ChatFormat | None) -> None:
    missing = [name for name in NEEDED if not isinstance(row, dict) or name not in row]
    if missing:
        raise PackedFileError(f"{where} is no regenerated row: it has no {', '.join(missing)}")
    check_row(row, where, chat)
    if chat is not None and not row.get("messages"):
        raise PackedFileError(f"{where}: no messages, its prompt cannot be verified")


def _json_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
