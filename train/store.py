"""Samples in memory, and whether those to evaluate on were trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from train.chat import Sample


class TokenStore:
    """Samples as flat arrays; a random-access source for Grain.

    Item i is `{"tokens": int32 [T], "loss_mask": bool [T], "sample_id": i}`; `ids[i]` is the
    record's own id. `looping`, `prompt_keys` and `files` have the `Sample`'s fields by row.
    """

    def __init__(self, samples: Iterable[Sample]):
        samples = list(samples)
        if not samples:
            raise ValueError("no training samples")
        self.ids = [sample.id for sample in samples]
        self.files = [sample.file for sample in samples]
        self.looping = np.array([sample.looping for sample in samples])
        self.prompt_keys = np.array([sample.prompt_key for sample in samples], np.uint64)
        self.lengths = np.array([len(sample.tokens) for sample in samples])
        self._ends = np.cumsum(self.lengths)
        self._tokens = np.concatenate([sample.tokens for sample in samples])
        self._mask = np.concatenate([sample.loss_mask for sample in samples])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        end = self._ends[index]
        part = slice(end - self.lengths[index], end)
        return {
            "tokens": self._tokens[part],
            "loss_mask": self._mask[part],
            "sample_id": int(index),
        }

    def prompt(self, index: int) -> np.ndarray:
        """What comes before a row's first supervised token."""
        row = self[index]
        return row["tokens"][: int(np.argmax(row["loss_mask"]))]

    def checksum(self) -> str:
        """Of tokens, masks and lengths: saved with a run, it shows that a resume has its data."""
        digest = hashlib.sha256()
        for array in (self.lengths.astype(np.int64), self._tokens, self._mask):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class StorePart:
    """Some rows of a `TokenStore`, in its place, under the sample ids that they have there."""

    def __init__(self, store: TokenStore, rows: np.ndarray):
        self.lengths = store.lengths[rows]
        self._store, self._rows = store, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return self._store[self._rows[index]]


def check_disjoint(train: TokenStore, held_out: TokenStore) -> None:
    """Refuses evaluation rows whose prompt is trained on.

    Two prompts are the same where their first user messages are, or their ids.

    Raises:
      ValueError: how many there are, and one of them with both files.
    """

    def digest(store: TokenStore, i: int) -> bytes:
        return hashlib.blake2b(store.prompt(i).tobytes(), digest_size=16).digest()

    keys = {int(key): i for i, key in enumerate(train.prompt_keys)}
    digests = {digest(train, i): i for i in range(len(train))}
    shared = []
    for i, key in enumerate(held_out.prompt_keys):
        where = keys.get(int(key), digests.get(digest(held_out, i)))
        if where is not None:
            shared.append((i, where))
    if shared:
        i, where = shared[0]
        raise ValueError(
            f"{len(shared)} of {len(held_out)} prompts to evaluate on are also trained on, as row "
            f"{held_out.ids[i]!r} of {held_out.files[i]} (data.eval), which is row "
            f"{train.ids[where]!r} of {train.files[where]} (data.train)"
        )
