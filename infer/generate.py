"""Batched generation with text: prompts in, `GenerationOutput` with `text` out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

from dflash_jax.drafter import Drafter
from dflash_jax.generation import (
    CustomDrafter,
    GenerationOutput,
    SamplingParams,
    generate_ids,
)
from dflash_jax.target import Target
from infer.prompts import Prompt, encode_prompts

GREEDY = SamplingParams()
# Cycles after which a drafter that never helped is worth a warning.
USELESS_CYCLES = 64


def generate(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    max_new_tokens: int | Sequence[int] = 256,
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    block_size: int | None = None,
    draft_policy: str = "argmax",
    logprobs: bool = False,
    enable_thinking: bool | None = None,
) -> GenerationOutput:
    """Generates for a list of prompts in one device loop; with the same seed the ids are those of
    plain decoding, whatever the drafter.

    Args:
      drafter: None = plain autoregressive decoding.
      prompts: a list; each prompt is a string (tokenized as it is), a list of token ids or a list
        of `{role, content}` messages (the chat template is applied). See `infer.prompts`.
      sampling, max_new_tokens, stop_token_ids: one value, or one a prompt. `stop_token_ids=None`
        means the ids stated in the target's own files, `()` none. A row ends at the target's
        context limit at the latest.
      block_size: slots a cycle verifies, the anchor included; None = the drafter's own, 1 = plain.
      draft_policy: "argmax" (published) or "coupled" (drafts take the target's noise at T > 0).
      logprobs: also return the target's log-probability of each token.
      enable_thinking: passed to the chat template.

    Returns:
      New tokens only. A stop token is the last of `token_ids` and not part of `text`; special
      tokens are left out of `text`, which is None where the target has no tokenizer.

    Raises:
      ValueError: an argument does not fit, with its name and value.
      TypeError: an option that does not exist here (penalties, grammars, stop strings, ...).
    """
    output = generate_ids(
        target,
        drafter,
        encode_prompts(target, prompts, enable_thinking),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        block_size=block_size,
        draft_policy=draft_policy,
        logprobs=logprobs,
    )
    warn_if_useless(drafter, block_size, output)
    return with_text(target, output)


def with_text(target: Target, output: GenerationOutput) -> GenerationOutput:
    """Fills `text`, where the target has a tokenizer."""
    if target.tokenizer is None:
        return output
    text = [
        decode_ids(target, text_ids(ids, reason))
        for ids, reason in zip(output.token_ids, output.finish_reasons, strict=True)
    ]
    return dataclasses.replace(output, text=text)


def text_ids(ids: list[int], finish_reason: str) -> list[int]:
    """The ids that make the text: all but the stop token."""
    return ids[:-1] if finish_reason == "stop" else ids


def decode_ids(target: Target, ids: list[int]) -> str:
    """Text of new tokens, special tokens left out. Spaces stay as the model wrote them: cleaning
    them up would rewrite text that has been streamed already."""
    return target.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def warn_if_useless(
    drafter: Drafter | CustomDrafter | None, block_size: int | None, output: GenerationOutput
) -> None:
    """Warns where a DFlash drafter had not a single draft accepted over many cycles: most often it
    belongs to another target or its numbers overflow."""
    if not isinstance(drafter, Drafter) or (block_size or drafter.config.block_size) == 1:
        return
    cycles = sum(len(row) for row in output.acceptance_lengths)
    if cycles >= USELESS_CYCLES and output.mean_acceptance_length == 1.0:
        warnings.warn(
            f"the drafter had no draft accepted in {cycles} cycles (mean acceptance length 1.0): "
            "was it trained for this target?",
            stacklevel=3,
        )
