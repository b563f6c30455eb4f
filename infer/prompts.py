"""Prompts in their three forms -> token ids.

| form | example | how it becomes ids |
|---|---|---|
| ids | `[1, 5, 7]`, a 1-D integer array | as they are |
| text | `"Once upon"` | tokenized as it is; special tokens by the tokenizer's own policy |
| chat | `[{"role": "user", "content": "Hi"}]` | chat template, then the generation prompt |

`generate` takes a LIST of prompts and `stream` ONE prompt; neither guesses the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from dflash_jax.target import Target

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


def encode_prompts(
    target: Target, prompts: Sequence[Prompt], enable_thinking: bool | None = None
) -> list[list[int]]:
    """Ids of a list of prompts, whose forms may be mixed.

    Args:
      enable_thinking: passed to the chat template; None leaves it to the template's default.

    Raises:
      ValueError: one bare prompt instead of a list, a prompt of no known form, text or chat for a
        target without a tokenizer (or chat template), `enable_thinking` without any chat prompt.
    """
    if isinstance(prompts, Mapping) or _form(prompts) is not None:
        raise ValueError(
            "prompts: a single prompt was given where a list of prompts is expected; "
            "write [prompt] for a batch of one"
        )
    if not _is_sequence(prompts):
        raise ValueError(f"prompts: {type(prompts).__name__} is not a list of prompts")
    forms = [_known_form(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    _check_thinking(enable_thinking, forms)
    return [
        _encode(target, prompt, form, f"prompts[{i}]", enable_thinking)
        for i, (prompt, form) in enumerate(zip(prompts, forms, strict=True))
    ]


def encode_prompt(target: Target, prompt: Prompt, enable_thinking: bool | None = None) -> list[int]:
    """Ids of one prompt. Raises ValueError as `encode_prompts`, and for a list of prompts."""
    form = _known_form(prompt, "prompt")
    _check_thinking(enable_thinking, [form])
    return _encode(target, prompt, form, "prompt", enable_thinking)


def has_chat_template(target: Target) -> bool:
    """Whether chat messages can be rendered for this target."""
    return bool(getattr(target.tokenizer, "chat_template", None))


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, bytes)


def _form(prompt: Any) -> str | None:
    """ "text", "ids" or "chat"; None for anything else."""
    if isinstance(prompt, str):
        return "text"
    if not _is_sequence(prompt) or not len(prompt):
        return None
    if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in prompt):
        return "ids"
    return "chat" if all(isinstance(item, Mapping) for item in prompt) else None


def _known_form(prompt: Any, where: str) -> str:
    form = _form(prompt)
    if form is not None:
        return form
    if _is_sequence(prompt) and not len(prompt):
        raise ValueError(f"{where}: empty; at least one token or message is needed")
    raise ValueError(
        f"{where}: {_describe(prompt)} is not a string, a list of token ids or a list of "
        "{role, content} messages"
    )


def _describe(value: Any) -> str:
    if not _is_sequence(value):
        return type(value).__name__
    kinds = sorted({type(item).__name__ for item in value})
    return f"a {type(value).__name__} of {', '.join(kinds)}"


def _check_thinking(enable_thinking: bool | None, forms: list[str]) -> None:
    if enable_thinking is not None and "chat" not in forms:
        raise ValueError(
            f"enable_thinking: {enable_thinking} is for chat messages, which go through the chat "
            "template; text and ids are taken as they are"
        )


def _encode(
    target: Target, prompt: Any, form: str, where: str, enable_thinking: bool | None
) -> list[int]:
    if form == "ids":
        return [int(token) for token in prompt]
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{where}: target {target.name!r} has no tokenizer; give token ids instead of {form}"
        )
    if form == "text":
        ids = tokenizer.encode(prompt, verbose=False)
    else:
        # The template writes the special tokens itself.
        text = _render(target, prompt, where, enable_thinking)
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if not ids:
        raise ValueError(f"{where}: {form} without a single token; at least one is needed")
    return ids


def _render(
    target: Target, messages: Sequence[Mapping[str, Any]], where: str, enable_thinking: bool | None
) -> str:
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}[{i}]: role {message.get('role')!r} is not a string")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"{where}[{i}]: content {message.get('content')!r} is not a string")
    if not has_chat_template(target):
        raise ValueError(
            f"{where}: the tokenizer of target {target.name!r} has no chat template; give text"
        )
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        return target.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **options,
        )
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses it: {error}") from error
