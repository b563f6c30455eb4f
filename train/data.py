"""Training rows: files -> token store -> Grain batches of one static shape.

Read are conversation files (`conversations.py`) and regenerated files, told apart by their keys.
A regenerated file (written by scripts/regenerate.py) is JSONL, one row a prompt:

    {"id": str,                the source record's id
     "prompt_ids": [int],      what generation started from: template, thinking mode, all applied
     "response_ids": [int],    the target's tokens, the stop token included where it came
     "finish_reason": "stop" | "length",
     "temperature": float, "top_k": int, "top_p": float, "seed": int,
     "messages": [{"role", "content"}],   the prompt's messages, without the response
     "target": str}            name of the target that answered

or the same rows packed into one `.npz` file (`train/packed.py`). Ids are used verbatim; a response
that ended by length gets no end-of-sequence token. A batch has one sample a row, padded on the
right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grain
import numpy as np

from train.chat import ChatFormat, Sample, sample_from_ids
from train.conversations import (
    ReadReport,
    Selector,
    UnusableRow,
    first_user_text,
    normalise,
    read_rows,
    resolve_path,
    split_key,
)
from train.packed import PackedFileError, is_packed, read_packed
from train.regenerated import check_row, is_regenerated, split_text
from train.repetition import is_looping, length_without_loop
from train.store import StorePart, TokenStore


@dataclass
class DataReport(ReadReport):
    """What became of the rows: rows = kept + sum(unusable). Print it.

    Attributes:
      regenerated: kept rows that came as recorded ids.
      truncated: kept rows that were cut at max_length.
      last_turn_only: kept rows of several assistant turns, of which one is supervised.
      plain_turns: assistant turns of kept rows left unsupervised (empty, tool calls, reasoning).
      looping: rows read whose response ends in a loop, whatever became of them.
      loop_tokens: tokens cut off such responses.
      unchecked: packed files that do not say which template their prompts come from.
      tokens, supervised_tokens: of the kept rows.
    """

    regenerated: int = 0
    truncated: int = 0
    last_turn_only: int = 0
    plain_turns: int = 0
    looping: int = 0
    loop_tokens: int = 0
    unchecked: list[str] = field(default_factory=list)
    tokens: int = 0
    supervised_tokens: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.kept} of {self.rows} rows kept ({self.regenerated} regenerated), "
            f"{self.tokens} tokens, {self.supervised_tokens} supervised"
        ]
        lines += [f"  left out, {reason}: {n}" for reason, n in self.unusable.most_common()]
        notes = {
            **self.adjusted,
            "cut at max_length": self.truncated,
            "only the last turn supervised": self.last_turn_only,
            "assistant turns without plain text, unsupervised": self.plain_turns,
        }
        lines += [f"  kept, {note}: {n}" for note, n in notes.items() if n]
        if self.looping:
            cut = f", {self.loop_tokens} tokens of them cut off" if self.loop_tokens else ""
            lines.append(f"  responses that end in a loop: {self.looping}{cut}")
        lines += [
            f"  {text}: prompts of ids only, their template unknown" for text in self.unchecked
        ]
        lines += [f"  {text}" for text in self.broken]
        return "\n".join(lines)


def load_samples(
    files: str | Path | Sequence[str | Path],
    chat: ChatFormat | None,
    *,
    max_length: int,
    vocab_size: int,
    target_name: str | None = None,
    held_out_fraction: float = 0.0,
    held_out: bool = False,
    on_truncation: str = "error",
    loops: str = "keep",
    limit: int | None = None,
) -> tuple[TokenStore, DataReport]:
    """Reads, renders and masks all rows of the files.

    Args:
      files: paths or aliases, of conversations or regenerated rows.
      chat: renders conversations and checks the prompts of regenerated rows; None: rows of ids
        only, unchecked.
      max_length: tokens a sample may have; longer ones are cut.
      vocab_size: rows of the target's embedding; an id beyond it is an error.
      target_name: the target that regenerated rows must name; None takes any.
      held_out_fraction, held_out: the split and which side of it to read.
      on_truncation: "error" or "keep", for broken files (`read_rows`).
      loops: what becomes of regenerated responses that end in a loop: "keep", "cut" (after its
        first period, without an end of sequence) or "drop".
      limit: stop after so many kept rows.

    Raises:
      ValueError: a broken file, ids outside the vocabulary, another target's or template's rows,
        or no usable row at all (with the counts).
    """
    files = [files] if isinstance(files, (str, Path)) else list(files)
    report = DataReport()
    selector = Selector(held_out_fraction, held_out)
    samples: list[Sample] = []
    for name in files:
        path = resolve_path(name)
        for index, row in enumerate(_rows(path, chat, on_truncation, report)):
            if limit is not None and len(samples) >= limit:
                break
            report.rows += 1
            try:
                if is_regenerated(row):
                    check_row(row, f"{path}: row {index}", chat, target_name)
                    sample = _regenerated_sample(row, index, selector, max_length, loops, report)
                    report.regenerated += 1
                else:
                    sample = _conversation_sample(row, index, selector, chat, max_length, report)
                    report.looping += sample.looping
            except UnusableRow as error:
                report.unusable[error.reason] += 1
                continue
            if sample.tokens.min() < 0 or sample.tokens.max() >= vocab_size:
                raise ValueError(
                    f"{path}: row {index} has token ids {sample.tokens.min()}.."
                    f"{sample.tokens.max()}, the target's vocab_size is {vocab_size}"
                )
            samples.append(replace(sample, file=str(path)))
            report.truncated += sample.truncated
            report.last_turn_only += sample.last_turn_only
            report.plain_turns += sample.plain_turns
    report.kept = len(samples)
    if not samples:
        raise ValueError(f"no usable row in {', '.join(map(str, files))}:\n{report}")
    report.tokens = sum(len(sample.tokens) for sample in samples)
    report.supervised_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return TokenStore(samples), report


def _rows(
    path: Path, chat: ChatFormat | None, on_truncation: str, report: DataReport
) -> Iterator[Any]:
    """The records of a file; a packed one must come from the template that this run has."""
    if not is_packed(path):
        yield from read_rows(path, on_truncation=on_truncation, report=report)
        return
    packed = read_packed(path)
    template = packed.meta["template"]
    if template is None:
        report.unchecked.append(str(path))
    elif chat is not None and template != chat.fingerprint():
        raise PackedFileError(
            f"{path}: its prompts come from the template {template}, this run's is "
            f"{chat.fingerprint()}: another chat template or thinking mode "
            f"(enable_thinking={chat.enable_thinking})"
        )
    yield from packed.rows()


def _regenerated_sample(
    row: dict, index: int, selector: Selector, max_length: int, loops: str, report: DataReport
) -> Sample:
    prompt_ids, response_ids = row["prompt_ids"], row["response_ids"]
    key = row["split_key"] if "split_key" in row else split_key(split_text(row))
    selector.check([prompt_ids, response_ids], key)
    looping = is_looping(response_ids)
    report.looping += looping
    if looping and loops == "drop":
        raise UnusableRow("the response ends in a loop")
    if looping and loops == "cut":
        kept = length_without_loop(response_ids)
        report.loop_tokens += len(response_ids) - kept
        response_ids = response_ids[:kept]
    sample = sample_from_ids(
        str(row.get("id", index)), prompt_ids, response_ids, max_length=max_length
    )
    return replace(_with_anchor(sample), looping=looping, prompt_key=key)


def _conversation_sample(
    row: Any,
    index: int,
    selector: Selector,
    chat: ChatFormat | None,
    max_length: int,
    report: DataReport,
) -> Sample:
    conversation, dropped = normalise(row, index)
    selector.check(conversation.messages, first_user_text(conversation.messages))
    if chat is None:
        raise ValueError("conversation rows need a tokenizer with a chat template, got none")
    sample = _with_anchor(chat.sample(conversation, max_length=max_length))
    report.adjusted["leading assistant turns removed"] += dropped
    return replace(
        sample,
        looping=is_looping(sample.tokens[sample.loss_mask]),
        prompt_key=split_key(first_user_text(conversation.messages)),
    )


def _with_anchor(sample: Sample) -> Sample:
    if not sample.has_anchor:
        raise UnusableRow("no anchor: no two supervised tokens in a row within max_length")
    return sample


def num_batches(
    rows: int, *, batch_size: int, epochs: int | None, drop_remainder: bool = True
) -> int | None:
    """Batches of `make_loader`; None: without end. The remainder falls at the end of the run only,
    since batches run across the edges of epochs."""
    if epochs is None:
        return None
    total = rows * epochs
    return total // batch_size if drop_remainder else -(-total // batch_size)


def make_loader(
    store: TokenStore | StorePart,
    *,
    batch_size: int,
    seq_length: int,
    seed: int,
    epochs: int | None = None,
    shuffle: bool = True,
    host_index: int = 0,
    host_count: int = 1,
    drop_remainder: bool = True,
    pad_id: int = 0,
) -> grain.IterDataset:
    """Batches of this host; `iter()` of it has `get_state` / `set_state`, exact on resume.

    Position p of the shuffled, repeated rows goes to host p % host_count, so that the hosts'
    shards are disjoint and complete in every epoch, and step s has the same rows whatever the
    host count: a run may be resumed on another one.

    Args:
      store: rows no longer than seq_length.
      batch_size: rows of all hosts together; divisible by host_count.
      seq_length: T, the static length; rows are padded on the right with pad_id.
      seed: of the order; each epoch has its own.
      epochs: None repeats without end.
      drop_remainder: True leaves the last rows % batch_size rows of the RUN out; False fills the
        last batch with empty rows (length 0, mask False, sample_id -1).

    Returns:
      Batches `{"tokens_BT": int32, "loss_mask_BT": bool, "length_B": int32, "sample_id_B": int32}`,
      B = batch_size / host_count, all hosts equally many.
    """
    if batch_size % host_count or not 0 <= host_index < host_count:
        raise ValueError(
            f"batch_size {batch_size} over host {host_index} of {host_count}: the size must be "
            "divisible, the index below the count"
        )
    if store.lengths.max() > seq_length:
        raise ValueError(f"a row has {store.lengths.max()} tokens, seq_length is {seq_length}")
    batches = num_batches(
        len(store), batch_size=batch_size, epochs=epochs, drop_remainder=drop_remainder
    )
    if batches == 0:
        raise ValueError(
            f"{len(store)} rows x {epochs} epochs are less than one batch of {batch_size}, and "
            "drop_remainder is set"
        )
    rows = grain.MapDataset.source(store)
    if shuffle:
        rows = rows.seed(seed).shuffle()
    rows = rows.repeat(epochs)
    if batches is not None:
        size = batches * batch_size
        if size > len(rows):
            empty = {"tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, bool)}
            filler = [{**empty, "sample_id": -1}] * (size - len(rows))
            rows = grain.MapDataset.concatenate([rows, grain.MapDataset.source(filler)])
        rows = rows[:size]
    shard = rows[host_index::host_count].map(lambda row: pad_row(row, seq_length, pad_id))
    # Padding costs microseconds: no threads, so nothing is in flight when the state is taken.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return shard.batch(batch_size // host_count, drop_remainder=True).to_iter_dataset(options)


def pad_row(row: dict[str, Any], seq_length: int, pad_id: int = 0) -> dict[str, Any]:
    """A row of `TokenStore` at its static length; batching stacks these and adds the B axis."""
    length = len(row["tokens"])
    tokens = np.full(seq_length, pad_id, np.int32)
    tokens[:length] = row["tokens"]
    mask = np.zeros(seq_length, bool)
    mask[:length] = row["loss_mask"]
    return {
        "tokens_BT": tokens,
        "loss_mask_BT": mask,
        "length_B": np.int32(length),
        "sample_id_B": np.int32(row["sample_id"]),
    }
