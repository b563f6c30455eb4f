"""Batched generation on token ids: checks and sizing on the host around the loop of `decode`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dflash_jax.decode import (
    DecodeParams,
    DecodeSpec,
    DecodeState,
    DFlashProposer,
    Proposer,
    prefill,
    run_cycles,
)
from dflash_jax.drafter import Drafter, check_fits
from dflash_jax.sampling import Sampling, SamplingMode
from dflash_jax.target import Params, Target
from dflash_jax.verify import STOP

T = TypeVar("T")
UNBOUNDED = np.int32(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Transform order: temperature, top-k, top-p.

    Attributes:
      temperature: in 0..1e6; 0 is greedy.
      top_k: 0 = off.
      top_p: in (0, 1]; 1 = off.
      seed: the same seed gives the same ids, whatever the batch, the drafter or the block size.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 1e6:
            raise ValueError(f"temperature: {self.temperature} must be in 0..1e6 (0 is greedy)")
        if not 0 <= self.top_k < 2**31 or int(self.top_k) != self.top_k:
            raise ValueError(f"top_k: {self.top_k} must be an integer in 0..2**31 - 1 (0 = off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be in (0, 1] (1 = off)")
        if not 0 <= self.seed < 2**32 or int(self.seed) != self.seed:
            raise ValueError(f"seed: {self.seed} must be an integer in 0..2**32 - 1")

    @property
    def mode(self) -> SamplingMode:
        """The cheapest loop that serves these parameters."""
        if self.temperature == 0:
            return SamplingMode.GREEDY
        filtered = self.top_k > 0 or self.top_p < 1
        return SamplingMode.FILTER if filtered else SamplingMode.SAMPLE


@dataclasses.dataclass(frozen=True)
class CustomDrafter:
    """Anything that speaks the `decode.Proposer` protocol, in place of a DFlash drafter."""

    proposer: Proposer
    params: Params


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """What a generation gives back, one entry a prompt.

    Attributes:
      token_ids: new tokens only.
      acceptance_lengths: tokens committed per cycle, bonus included. The prefill's token is not
        counted: `1 + sum(row) == len(token_ids[row])` for a row that emitted anything.
      finish_reasons: "stop" or "length".
      cut: the row's last cycle was cut at a stop id or the budget.
      logprobs: the target's natural log-probability of each token, unmodified by temperature or
        filters; None unless requested.
      text: decoded tokens, where a tokenizer is at hand.
    """

    token_ids: list[list[int]]
    acceptance_lengths: list[list[int]]
    finish_reasons: list[str]
    cut: list[bool]
    logprobs: list[list[float]] | None = None
    text: list[str] | None = None

    def row(self, index: int) -> GenerationOutput:
        """The output of one prompt."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return GenerationOutput(**{k: v and v[index : index + 1] for k, v in values.items()})

    @property
    def mean_acceptance_length(self) -> float:
        """tau: committed tokens over cycles of all rows, cut cycles excluded; NaN without one."""
        lengths = [
            length
            for row, cut in zip(self.acceptance_lengths, self.cut, strict=True)
            for length in (row[:-1] if cut else row)
        ]
        return sum(lengths) / len(lengths) if lengths else math.nan


@dataclasses.dataclass(frozen=True)
class Request:
    """A batch ready for the device: what `prefill` and `run_cycles` take."""

    spec: DecodeSpec
    params: DecodeParams
    tokens_BS: np.ndarray
    prompt_length_B: np.ndarray
    limit_B: np.ndarray
    stop_ids_BN: np.ndarray
    sampling: Sampling

    def prefill(self) -> DecodeState:
        return prefill(
            self.spec,
            self.params,
            self.tokens_BS,
            self.prompt_length_B,
            self.limit_B,
            self.stop_ids_BN,
            self.sampling,
        )

    def run(self, state: DecodeState, max_cycles: int | np.int32 = UNBOUNDED) -> DecodeState:
        """Advances the state, whose buffers are given away."""
        return run_cycles(self.spec, self.params, state, np.int32(max_cycles))


def slot_bucket(needed: int, chunk: int) -> int:
    """Cache slots for a request: 128, 256, 512, 768, 1024, 1536, ... and a multiple of `chunk`.

    Few sizes bound the number of compilations; the half steps bound the waste.
    """
    size = 128
    while True:
        for candidate in (size, size * 3 // 2):
            if candidate >= needed and candidate != 192:
                return math.ceil(candidate / chunk) * chunk
        size *= 2


def default_prefill_chunk() -> int:
    """Prompt tokens a pass: a CPU gains nothing from wide passes, an accelerator does."""
    return 32 if jax.default_backend() == "cpu" else 256


def per_row(
    name: str, value: T | Sequence[T], rows: int, scalar: type | tuple[type, ...]
) -> list[T]:
    """One value for all rows, or one a row.

    Raises:
      ValueError: a list of another length, with both lengths.
    """
    if isinstance(value, scalar):
        return [value] * rows  # type: ignore[list-item]
    values = list(value)  # type: ignore[arg-type]
    if len(values) != rows:
        raise ValueError(f"{name}: {len(values)} values for {rows} prompts")
    return values


def make_request(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    max_new_tokens: int | Sequence[int] = 256,
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    block_size: int | None = None,
    draft_policy: str = "argmax",
    logprobs: bool = False,
    prefill_chunk: int | None = None,
    num_slots: int | None = None,
) -> Request:
    """Checks and sizes a batch. Arguments as in `generate_ids`; `num_slots` fixes the cache size.

    Raises:
      ValueError: an argument does not fit, with its name and value.
    """
    rows = len(prompts)
    if not rows:
        raise ValueError("prompts: at least one is needed")
    context = target.config.max_position_embeddings
    ids = [check_ids(prompt, target.config.vocab_size, i) for i, prompt in enumerate(prompts)]
    lengths = np.array([len(row) for row in ids], np.int32)
    if lengths.max() >= context:
        row = int(lengths.argmax())
        raise ValueError(
            f"prompts[{row}]: {lengths[row]} tokens leave no room in the target's context of "
            f"{context} (max_position_embeddings)"
        )
    budgets = per_row("max_new_tokens", max_new_tokens, rows, (int, np.integer))
    for i, budget in enumerate(budgets):
        if int(budget) != budget or budget < 0:
            raise ValueError(f"max_new_tokens: {budget} for prompt {i} must be an integer >= 0")
    # Python integers: a budget that means "no limit" would overflow int32.
    ends = [len(row) + int(budget) for row, budget in zip(ids, budgets, strict=True)]
    limits = np.array([min(end, context) for end in ends], np.int32)
    samplings = per_row("sampling", sampling, rows, SamplingParams)
    if isinstance(drafter, Drafter):
        check_fits(drafter.config, target, "the drafter")
    proposer, draft_params = as_proposer(drafter, block_size, draft_policy)
    chunk = default_prefill_chunk() if prefill_chunk is None else prefill_chunk
    if int(chunk) != chunk or chunk < 1:
        raise ValueError(f"prefill_chunk: {chunk} must be an integer >= 1")
    spec = DecodeSpec(
        target=target.model,
        proposer=proposer,
        mode=max((s.mode for s in samplings), key=list(SamplingMode).index),
        logprobs=logprobs,
        prefill_chunk=chunk,
    )
    needed = int(limits.max()) + spec.block_size
    slots = num_slots or slot_bucket(needed, chunk)
    if slots < needed or slots % chunk:
        raise ValueError(
            f"num_slots: {slots} must be a multiple of {chunk} (prefill_chunk) and at least "
            f"{needed} (prompt + max_new_tokens + block_size)"
        )
    tokens_BS = np.zeros((rows, slots), np.int32)
    for i, prompt in enumerate(ids):
        tokens_BS[i, : len(prompt)] = prompt
    return Request(
        spec=spec,
        params=DecodeParams(target.params, draft_params),
        tokens_BS=tokens_BS,
        prompt_length_B=lengths,
        limit_B=limits,
        stop_ids_BN=stop_rows(stop_token_ids, target, rows),
        sampling=Sampling(
            temperature_B=np.array([s.temperature for s in samplings], np.float32),
            top_k_B=np.array([s.top_k for s in samplings], np.int32),
            top_p_B=np.array([s.top_p for s in samplings], np.float32),
            seed_B=np.array([s.seed for s in samplings], np.uint32),
        ),
    )


def check_ids(prompt: Sequence[int], vocab_size: int, row: int) -> list[int]:
    """A prompt as a list of ids. Out-of-range ids would be clamped on the device without a word."""
    ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError(f"prompts[{row}]: empty; at least one token is needed")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(
            f"prompts[{row}]: token id {bad} is outside the vocabulary of {vocab_size}"
        )
    return ids


def stop_rows(
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None, target: Target, rows: int
) -> np.ndarray:
    """[B, N] stop ids padded with -1; None = those of the target's own files, () = none."""
    if stop_token_ids is None:
        stop_token_ids = target.stop_token_ids
    given = list(stop_token_ids)
    vocab_size = target.config.vocab_size
    flat = all(isinstance(item, (int, np.integer)) for item in given)
    lists: list[Any] = [given] * rows if flat else per_row("stop_token_ids", given, rows, ())
    for token in (token for item in lists for token in (item if np.iterable(item) else [item])):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise ValueError(
                f"stop_token_ids: {token!r} is no id of the vocabulary of {vocab_size}"
            )
    # Widths 4, 8, 16, ...: another number of stop ids seldom means another compilation.
    width = 4
    while width < max(len(item) for item in lists):
        width *= 2
    out = np.full((rows, width), -1, np.int32)
    for i, item in enumerate(lists):
        out[i, : len(item)] = item
    return out


def as_proposer(
    drafter: Drafter | CustomDrafter | None, block_size: int | None, draft_policy: str
) -> tuple[Proposer | None, Params]:
    """The static proposer and its parameters; (None, None) means plain decoding."""
    if draft_policy not in ("argmax", "coupled"):
        raise ValueError(f"draft_policy: {draft_policy!r} is not 'argmax' or 'coupled'")
    if block_size is not None and (int(block_size) != block_size or block_size < 1):
        raise ValueError(f"block_size: {block_size} must be an integer >= 1")
    if drafter is None:
        if block_size not in (None, 1):
            raise ValueError(f"block_size: {block_size} needs a drafter; without one it is 1")
        return None, None
    if isinstance(drafter, CustomDrafter):
        if block_size not in (None, drafter.proposer.block_size):
            raise ValueError(
                f"block_size: {block_size}, but the proposer has {drafter.proposer.block_size}"
            )
        return drafter.proposer, drafter.params
    trained = drafter.config.block_size
    size = block_size or trained
    if size > trained:
        warnings.warn(
            f"block_size {size} is above the {trained} that the drafter was trained with; the "
            "extra slots are seldom accepted",
            stacklevel=3,
        )
    if size == 1:
        return None, None
    proposer = DFlashProposer(drafter.model, size, max(size, trained), draft_policy == "coupled")
    return proposer, drafter.params


def generate_ids(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    prompts: Sequence[Sequence[int]],
    **options: Any,
) -> GenerationOutput:
    """Generates for a batch of id prompts in one device loop.

    Args:
      drafter: None = plain autoregressive decoding with the same code; the ids are the same.
      prompts: id lists, not empty.
      sampling, max_new_tokens, stop_token_ids: one value or one a prompt. `stop_token_ids=None`
        means the ids stated in the target's files. A row ends at the context limit at the latest.
      block_size: slots a cycle verifies, at most the trained block to be useful; None = that. The
        draft pass has the slots of the trained block all the same.
      draft_policy: "argmax" (published) or "coupled".
      logprobs: also return the target's log-probabilities.
      prefill_chunk: prompt tokens a pass; None = by backend.

    Raises:
      ValueError: see `make_request`.
    """
    request = make_request(target, drafter, prompts, **options)
    return collect(request.run(request.prefill()), request.prompt_length_B)


def collect(state: DecodeState, prompt_length_B: np.ndarray) -> GenerationOutput:
    """Brings the results of a state to the host; running rows report what they have so far."""
    return to_output(jax.device_get(results(state)), prompt_length_B)


def results(state: DecodeState) -> dict[str, jax.Array]:
    """What `to_output` reads of a state, rows first."""
    return {
        "tokens": state.tokens_BS,
        "logprobs": state.logprobs_BS,
        "end": state.cache.length_B + 1,
        "accepted": state.accepted_BS,
        "cycles": state.cycles_B,
        "finish": state.finish_B,
        "cut": state.cut_B,
    }


def to_output(host: dict[str, np.ndarray], prompt_length_B: np.ndarray) -> GenerationOutput:
    """`results`, fetched, as lists."""
    spans = [slice(start, end) for start, end in zip(prompt_length_B, host["end"], strict=True)]
    with_logprobs = host["logprobs"].shape[1] > 0
    return GenerationOutput(
        token_ids=[row[span].tolist() for row, span in zip(host["tokens"], spans, strict=True)],
        acceptance_lengths=[
            row[:n].tolist() for row, n in zip(host["accepted"], host["cycles"], strict=True)
        ],
        finish_reasons=["stop" if finish == STOP else "length" for finish in host["finish"]],
        cut=[bool(cut) for cut in host["cut"]],
        logprobs=[row[span].tolist() for row, span in zip(host["logprobs"], spans, strict=True)]
        if with_logprobs
        else None,
    )
