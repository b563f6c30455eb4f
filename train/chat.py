"""Conversations as token ids with a mask over what the assistant wrote.

The mask is built from the template itself, not by searching for headers: the prompt of turn i is
`messages[:i]` with the generation prompt, and what follows it in the rendered whole is the turn.
So user text that contains the assistant's header changes nothing, and a turn counts only where
its ids decode to the message's content and one end-of-turn token. Templates that rewrite earlier
turns (Qwen3 takes their thinking out) break that for all but the last turn: then only one turn is
supervised, after exactly the prompt that generation would see.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from train.conversations import Conversation, Message, UnusableRow


@dataclass(frozen=True)
class Sample:
    """One training row.

    Attributes:
      id: the record's id.
      tokens: int32 [T], T <= max_length. Ends with an end-of-turn token only if the text did.
      loss_mask: bool [T], True on the assistant's tokens, their end-of-turn token included.
      truncated: tokens were cut off at max_length.
      last_turn_only: earlier assistant turns are context, not supervised.
      plain_turns: assistant turns left unsupervised because empty, or tool calls or reasoning in
        fields of their own, which cannot be checked against `content`.
      looping: the response ends in a loop (`train.repetition`).
      prompt_key: `conversations.split_key` of the prompt.
      file: the sample's, for messages.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    truncated: bool = False
    last_turn_only: bool = False
    plain_turns: int = 0
    looping: bool = False
    prompt_key: int = 0
    file: str = ""

    @property
    def has_anchor(self) -> bool:
        """Whether some p has loss_mask[p] and loss_mask[p + 1] (dflash.md, section 3)."""
        return bool(np.any(self.loss_mask[:-1] & self.loss_mask[1:]))


class _Unverified(UnusableRow):
    """A turn whose span in the rendered text is not its content and an end of turn."""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer with its chat template, used one way in training, evaluation and generation.

    Attributes:
      tokenizer: a Hugging Face tokenizer with a chat template.
      enable_thinking: passed to the template; None leaves it to the template's default.
      end_of_turn_ids: ids that may end an assistant turn: the target's stop ids. None takes every
        special token of the tokenizer.
    """

    tokenizer: Any
    enable_thinking: bool | None = None
    end_of_turn_ids: tuple[int, ...] | None = None
    _end_texts: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat_template: conversations cannot be rendered")
        ids = self.end_of_turn_ids
        if ids is None:
            added = self.tokenizer.added_tokens_decoder.items()
            ids = tuple(i for i, token in added if token.special)
        if any(not 0 <= i < len(self.tokenizer) for i in ids):
            raise ValueError(
                f"end_of_turn_ids {ids} are not all ids of the tokenizer ({len(self.tokenizer)})"
            )
        if not ids:
            raise ValueError("no end-of-turn token: give end_of_turn_ids")
        texts = {self.tokenizer.convert_ids_to_tokens(i): i for i in ids}
        object.__setattr__(self, "_end_texts", texts)

    def prompt_text(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """The messages and the generation prompt, rendered."""
        return self._render(messages, tools, add_generation_prompt=True)

    def prompt_ids(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """The ids that generation starts from; a sample's first turn starts from the same ones."""
        return self._encode(self.prompt_text(messages, tools))

    def fingerprint(self) -> str:
        """Of how prompts are rendered: another template, thinking mode or vocabulary has another
        one. It stands for the messages where a file holds ids only (`train.packed`)."""
        ask, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
        rendered = [self.prompt_ids([ask]), self.prompt_ids([ask, answer, ask])]
        return hashlib.sha256(json.dumps(rendered).encode()).hexdigest()[:16]

    def sample(self, conversation: Conversation, *, max_length: int) -> Sample:
        """Renders a conversation, cut at `max_length` tokens.

        All assistant turns are supervised if each can be verified, else the last one that fits.

        Raises:
          UnusableRow: nothing can be supervised; the reason says why.
        """
        messages, tools = conversation.messages, conversation.tools
        assistant = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        turns = [i for i in assistant if _is_plain_text(messages[i])]
        if not turns:
            raise UnusableRow("no assistant turn with plain text")
        try:
            try:
                tokens, mask, truncated = self._all_turns(messages, tools, turns, max_length)
                last_only = False
            except _Unverified:
                tokens, mask, truncated = self._last_turn(messages, tools, turns, max_length)
                last_only = len(turns) > 1
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it: {str(error)[:80]}") from error
        return Sample(
            id=conversation.id,
            tokens=np.array(tokens, np.int32),
            loss_mask=np.array(mask, bool),
            truncated=truncated,
            last_turn_only=last_only,
            plain_turns=len(assistant) - len(turns),
        )

    def _all_turns(self, messages, tools, turns, max_length) -> tuple[list[int], list[bool], bool]:
        """Every turn of ONE rendering, tokenized once as a whole. What stands before a turn must
        tokenize alone as it does there: turn i's prompt ids are then a prefix of the sample's."""
        full = self._render(messages[: turns[-1] + 1], tools, add_generation_prompt=False)
        tokens = self._encode(full)
        mask = [False] * len(tokens)
        done = at = 0  # characters of `full`, ids of `tokens`
        for turn in turns:
            start = self._turn_start(full, messages, tools, turn)
            if start < done:
                raise _Unverified("the template moves the assistant's turns")
            end = self._turn_end(full, start, messages[turn]["content"])
            context = self._encode(full[done:start])
            first = at + len(context)
            if tokens[at:first] != context:
                raise _Unverified("an assistant turn's first token merges with the text before it")
            response = self._response(tokens[first:], full[start:end])
            done, at = end, first + len(response)
            mask[first:at] = [True] * len(response)
            if at > max_length:
                break
        if not any(mask[:max_length]):
            raise UnusableRow("the prompt fills max_length")
        length = min(at, max_length)
        return tokens[:length], mask[:length], at > max_length or turn != turns[-1]

    def _last_turn(self, messages, tools, turns, max_length) -> tuple[list[int], list[bool], bool]:
        """One turn after its own prompt: the last whose prompt leaves room for two tokens."""
        low, high = 0, len(turns) - 1
        probe, best = high, None
        while low <= high:  # prompts grow with the turn
            prompt = self.prompt_ids(messages[: turns[probe]], tools)
            if len(prompt) + 2 <= max_length:
                best, low = (turns[probe], prompt), probe + 1
            else:
                high = probe - 1
            probe = (low + high) // 2
        if best is None:
            raise UnusableRow("the prompt fills max_length")
        turn, prompt = best
        full = self._render(messages[: turn + 1], tools, add_generation_prompt=False)
        start = self._turn_start(full, messages, tools, turn)
        text = full[start : self._turn_end(full, start, messages[turn]["content"])]
        response = self._response(self._encode(text), text)
        tokens = prompt + response
        mask = [False] * len(prompt) + [True] * len(response)
        truncated = len(tokens) > max_length or turn != turns[-1]
        return tokens[:max_length], mask[:max_length], truncated

    def _turn_start(self, full: str, messages, tools, turn: int) -> int:
        prompt = self.prompt_text(messages[:turn], tools)
        if not full.startswith(prompt):
            raise _Unverified("the generation prompt is not a prefix of the rendered turn")
        return len(prompt)

    def _turn_end(self, full: str, start: int, content: str) -> int:
        """Where content + end of turn ends. Templates may trim the content's outer whitespace."""
        for text in dict.fromkeys((content, content.lstrip(), content.rstrip(), content.strip())):
            if full.startswith(text, start):
                at = start + len(text)
                for end_text in self._end_texts:
                    if full.startswith(end_text, at):
                        return at + len(end_text)
        raise _Unverified("the template does not render content + end of turn as they are")

    def _response(self, ids: list[int], text: str) -> list[int]:
        """The ids up to the first end of turn, which must decode to exactly `text`."""
        ends = self._end_texts.values()
        length = next((n for n, i in enumerate(ids, 1) if i in ends), len(ids))
        decoded = self.tokenizer.decode(
            ids[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if decoded != text:
            inside = len(decoded) < len(text) and text.startswith(decoded)
            raise _Unverified(
                "an end of turn inside the assistant's text"
                if inside
                else "the assistant's ids do not decode to its text"
            )
        return ids[:length]

    def _render(self, messages, tools, *, add_generation_prompt: bool) -> str:
        options = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        if not messages:
            return ""
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself; verbose=False: length is our own affair.
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def sample_from_ids(
    id: str, prompt_ids: list[int], response_ids: list[int], *, max_length: int
) -> Sample:
    """A sample of a recorded response: the ids as they are, nothing added, cut at max_length.

    `response_ids` has its stop token only if the target produced one.
    """
    if len(prompt_ids) >= max_length:
        raise UnusableRow("the prompt fills max_length")
    if not response_ids:
        raise UnusableRow("empty response")
    tokens = np.array([*prompt_ids, *response_ids], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt_ids)
    return Sample(id, tokens[:max_length], mask[:max_length], truncated=len(tokens) > max_length)


def _is_plain_text(message: Message) -> bool:
    fields = message.get("tool_calls") or message.get("reasoning_content")
    return bool(message["content"].strip()) and not fields
