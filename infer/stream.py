"""Streaming: one prompt, text pieces (or id lists) as cycles finish.

The device work is that of `generate`, the same jitted `run_cycles` a few cycles at a time, so ids,
acceptance lengths and text are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from dflash_jax.drafter import Drafter
from dflash_jax.generation import (
    CustomDrafter,
    GenerationOutput,
    Request,
    SamplingParams,
    collect,
    make_request,
)
from dflash_jax.target import Target
from dflash_jax.verify import RUNNING, STOP
from infer.generate import GREEDY, decode_ids, text_ids, warn_if_useless, with_text
from infer.prompts import Prompt, encode_prompt

REPLACEMENT = "\ufffd"
# Byte tokens of SentencePiece-like vocabularies; a run of them is decoded as a whole.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Decodes a growing list of ids; the pieces concatenate to the text of the whole list.

    Text that later ids may still change is held back: trailing U+FFFD (bytes of an unfinished
    character) and a trailing run of byte tokens, all of which turn into U+FFFD if one of them does
    not fit. Each step decodes a window of two clean spans, not the whole list: the last span, and
    the one before it as context, so that a leading space is decoded as inside a text.
    """

    def __init__(self, target: Target):
        self._target = target
        self._tokenizer = target.tokenizer
        self._ids: list[int] = []
        self._context = 0  # start of the window
        self._clean = 0  # ids before this one are out, with nothing of them held back
        self._partial = ""  # what is out of the ids from `_clean` on
        self._pieces: list[str] = []
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        self._skipped = {i for i, token in added.items() if token.special}
        self._skipped |= set(self._tokenizer.all_special_ids)

    def push(self, ids: list[int]) -> str:
        """The text that these new ids make certain."""
        self._ids += ids
        settled = self._settled()
        context = decode_ids(self._target, self._ids[self._context : self._clean])
        window = decode_ids(self._target, self._ids[self._context : settled])
        new = window[len(context) :]
        certain = new.rstrip(REPLACEMENT)
        piece = certain[len(self._partial) :]
        if certain and certain == new:
            self._context, self._clean, self._partial = self._clean, settled, ""
        else:
            self._partial += piece
        self._pieces.append(piece)
        return piece

    def finish(self, text: str) -> str:
        """What is left of the final `text`.

        Raises:
          RuntimeError: the pieces so far are not a prefix of it: the tokenizer rewrites text when
            more ids follow.
        """
        emitted = "".join(self._pieces)
        if not text.startswith(emitted):
            raise RuntimeError(
                f"the tokenizer of target {self._target.name!r} decodes a longer list of ids to "
                f"other text than was streamed: {emitted[-40:]!r}; stream with as_ids=True"
            )
        return text[len(emitted) :]

    def _settled(self) -> int:
        """Where the trailing run of byte tokens starts; the number of ids if there is none. Tokens
        left out of the text do not interrupt a run."""
        start = end = len(self._ids)
        while end > self._clean:
            end -= 1
            if self._ids[end] in self._skipped:
                continue
            token = self._tokenizer.convert_ids_to_tokens(self._ids[end])
            if token is not None and not _BYTE_TOKEN.fullmatch(token):
                break
            if token is not None:
                start = end
        return start


class Stream(Iterator[Any]):
    """Pieces of one generation as they become certain: strings, or lists of ids. The work starts
    with the first one.

    `output` is the finished `GenerationOutput`, once the pieces are exhausted. A stream may be
    dropped at any time.
    """

    def __init__(self, pieces: Iterator[str | list[int] | GenerationOutput]):
        self._pieces = pieces
        self._output: GenerationOutput | None = None

    def __next__(self) -> Any:
        piece = next(self._pieces)
        if isinstance(piece, GenerationOutput):
            self._output = piece
            return next(self)
        return piece

    @property
    def output(self) -> GenerationOutput:
        """Raises RuntimeError before the last piece has been taken."""
        if self._output is None:
            raise RuntimeError("output: the stream has not finished; take all its pieces first")
        return self._output


def stream(
    target: Target,
    drafter: Drafter | CustomDrafter | None,
    prompt: Prompt,
    *,
    sampling: SamplingParams = GREEDY,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    draft_policy: str = "argmax",
    logprobs: bool = False,
    enable_thinking: bool | None = None,
    cycles_per_step: int = 1,
    as_ids: bool = False,
) -> Stream:
    """Generates for ONE prompt; text pieces concatenate to the text of `generate`, exactly.

    Args:
      prompt: a string, a list of token ids or a list of messages. Other arguments as in
        `generate`, for one prompt.
      cycles_per_step: cycles between two looks at the results: fewer = smoother, more = less
        overhead.
      as_ids: yield lists of new ids (they concatenate to `output.token_ids[0]`). A target without
        a tokenizer always does.

    Returns:
      An iterator of pieces, none of them empty; `.output` holds the result once it is exhausted.

    Raises:
      ValueError: at once, as `generate`.
    """
    if int(cycles_per_step) != cycles_per_step or cycles_per_step < 1:
        raise ValueError(f"cycles_per_step: {cycles_per_step} must be an integer >= 1")
    request = make_request(
        target,
        drafter,
        [encode_prompt(target, prompt, enable_thinking)],
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        block_size=block_size,
        draft_policy=draft_policy,
        logprobs=logprobs,
    )

    def pieces() -> Iterator[str | list[int] | GenerationOutput]:
        detokenizer = None if as_ids or target.tokenizer is None else Detokenizer(target)
        for step in _steps(request, cycles_per_step):
            if isinstance(step, GenerationOutput):
                warn_if_useless(drafter, block_size, step)
                output = with_text(target, step)
                if detokenizer and output.text and (rest := detokenizer.finish(output.text[0])):
                    yield rest
                yield output
            elif piece := detokenizer.push(text_ids(*step)) if detokenizer else step[0]:
                yield piece

    return Stream(pieces())


def _steps(
    request: Request, cycles_per_step: int
) -> Iterator[tuple[list[int], str] | GenerationOutput]:
    """New ids with "stop", "length" or "" (still running) after each step, then the output."""
    state = request.prefill()
    done = int(request.prompt_length_B[0])
    running = True
    while running:
        tokens_BS, length_B, finish_B = jax.device_get(
            (state.tokens_BS, state.cache.length_B, state.finish_B)
        )
        finish, end = int(finish_B[0]), int(length_B[0]) + 1
        running = finish == RUNNING
        if running:
            # Dispatched before the consumer gets the piece: the device works while it is used.
            state = request.run(state, cycles_per_step)
        reason = "" if running else "stop" if finish == STOP else "length"
        yield tokens_BS[0, done:end].tolist(), reason
        done = end
    yield collect(state, request.prompt_length_B)
