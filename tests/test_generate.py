"""Prompts in three forms, options that arrive or are refused, and the text of a generation."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import numpy as np
import pytest

import infer
from dflash_jax.drafter import Drafter
from dflash_jax.generation import generate_ids
from infer import SamplingParams, generate, stream
from infer.generate import USELESS_CYCLES, decode_ids
from infer.prompts import encode_prompt, encode_prompts
from tests.rigs import BLOCK, ORACLE, random_prompts, stub, tiny_drafter, tiny_target
from tests.text_rigs import CHATML, END, as_transformers, byte_level, small_tokenizer, text_target
from train.chat import ChatFormat

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say hello."}]
RENDERED = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
RENDERED += "<|im_start|>assistant\n"


def test_public_names() -> None:
    assert infer.__all__ == [
        *("GenerationOutput", "SamplingParams", "Stream", "generate", "stream"),
    ]
    names = list(inspect.signature(generate).parameters)
    assert names[:3] == ["target", "drafter", "prompts"]
    defaults = {n: p.default for n, p in inspect.signature(generate).parameters.items()}
    assert defaults["sampling"] == SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    assert defaults["max_new_tokens"] == 256
    assert defaults["draft_policy"] == "argmax"
    assert defaults["logprobs"] is False
    assert all(defaults[n] is None for n in ("stop_token_ids", "block_size", "enable_thinking"))


# --- prompts


def test_the_three_forms_give_ids() -> None:
    target = text_target()
    ids = encode_prompts(target, ["hello", [1, 2, 3], np.array([4, 5]), CHAT, (7,)])
    tokenizer = target.tokenizer
    assert ids[0] == tokenizer.encode("hello", add_special_tokens=False)
    assert ids[1:3] == [[1, 2, 3], [4, 5]]
    assert all(type(token) is int for row in ids for token in row)
    assert tokenizer.decode(ids[3]) == RENDERED
    assert ids[4] == [7]
    assert encode_prompts(target, np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


def test_text_follows_the_tokenizers_own_policy_and_chat_the_templates() -> None:
    target = dataclasses.replace(text_target(), tokenizer=small_tokenizer(add_bos=True))
    text, chat = encode_prompts(target, ["hello", CHAT])
    assert text[0] == target.tokenizer.bos_token_id
    assert target.tokenizer.bos_token_id not in chat


@pytest.mark.parametrize("thinking", [None, True, False])
def test_generation_renders_chats_as_training_does(thinking: bool | None) -> None:
    target = text_target()
    ids = encode_prompt(target, CHAT, thinking)
    assert ids == ChatFormat(target.tokenizer, enable_thinking=thinking).prompt_ids(CHAT)
    assert ("no thinking" in target.tokenizer.decode(ids)) == (thinking is False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", "single prompt"),
        ([1, 2, 3], "single prompt"),
        (np.array([1, 2, 3]), "single prompt"),
        (CHAT, "single prompt"),
        (CHAT[0], "single prompt"),
        (7, "int is not a list"),
        ([], "at least one"),
        ([[1], []], r"prompts\[1\]: empty"),
        ([""], r"prompts\[0\]: text without a single token"),
        ([[1, "a"]], r"prompts\[0\]: a list of int, str is not"),
        ([[1.0, 2.0]], r"prompts\[0\]: a list of float"),
        ([[True, False]], r"prompts\[0\]: a list of bool"),
        ([b"hello"], r"prompts\[0\]: bytes is not"),
        ([[["role", "user"]]], r"prompts\[0\]: a list of list"),
        ([[1], CHAT[0]], r"prompts\[1\]: dict"),
        ([[{"content": "x"}]], r"prompts\[0\]\[0\]: role None"),
        ([[{"role": "user"}]], r"prompts\[0\]\[0\]: content None"),
        ([[{"role": "user", "content": ["x"]}]], r"prompts\[0\]\[0\]: content \['x'\]"),
        ([[{"role": "tool", "content": "x"}]], r"refuses it: no tools here"),
        ([[1, 128]], r"prompts\[0\]: token id 128 is outside the vocabulary of 128"),
        ([[-1]], "token id -1"),
    ],
)
def test_prompts_that_are_none(prompts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(text_target(), None, prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1, 2], [3]], "prompt: a list of list is not"),
        (["hello", "you"], "prompt: a list of str is not"),
        ([], "prompt: empty"),
        ([CHAT], "prompt: a list of list"),
    ],
)
def test_stream_takes_one_prompt(prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(text_target(), None, prompt)


def test_a_target_without_tokenizer_or_template_takes_ids() -> None:
    bare = dataclasses.replace(tiny_target(), name="bare")
    for prompt in ("hello", CHAT):
        with pytest.raises(ValueError, match="'bare' has no tokenizer"):
            generate(bare, None, [prompt])
    assert generate(bare, None, [[1, 2]], max_new_tokens=3).text is None
    no_template = dataclasses.replace(text_target(), tokenizer=small_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="'tiny' has no chat template"):
        generate(no_template, None, [CHAT])


def test_thinking_is_for_chats() -> None:
    with pytest.raises(ValueError, match="enable_thinking: False is for chat messages"):
        generate(text_target(), None, ["hello", [1]], enable_thinking=False)
    assert encode_prompts(text_target(), ["hello", CHAT], enable_thinking=False)


# --- options


@pytest.mark.parametrize(
    "option",
    ["repetition_penalty", "presence_penalty", "stop", "n", "grammar", "logit_bias", "min_p"],
)
def test_unknown_options_are_refused_by_name(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        generate(tiny_target(), None, [[1]], **{option: 1})
    with pytest.raises(TypeError, match=option):
        stream(tiny_target(), None, [1], **{option: 1})
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})


def test_options_reach_the_loop() -> None:
    """One value a row, and everything else, as `generate_ids` takes it."""
    target, drafter = tiny_target(), tiny_drafter()
    prompts = random_prompts([3, 5, 2])
    options = {
        "sampling": [SamplingParams(), SamplingParams(1.0, seed=3), SamplingParams(0.7, 5, 0.9, 1)],
        "max_new_tokens": [9, 4, 12],
        "stop_token_ids": [(3,), (), (4, 5)],
        "block_size": 4,
        "draft_policy": "coupled",
        "logprobs": True,
    }
    out = generate(target, drafter, prompts, **options)
    assert out == generate_ids(target, drafter, prompts, **options)
    assert out.logprobs is not None
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.token_ids]
    assert out.token_ids == generate(target, None, prompts, **options | {"block_size": 1}).token_ids


# --- text


@pytest.mark.filterwarnings("ignore:the drafter had no draft accepted")  # a random drafter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_ids_decoded_and_the_same_with_a_drafter(temperature: float) -> None:
    target = text_target()
    prompts = ["hello", "a é", CHAT, [5, 6]]
    options = {"sampling": SamplingParams(temperature, seed=4), "max_new_tokens": 24}
    plain = generate(target, None, prompts, **options)
    out = generate(target, tiny_drafter(), prompts, **options)
    assert out.token_ids == plain.token_ids
    assert out.text == plain.text
    assert out.text is not None
    for text, ids, reason in zip(out.text, out.token_ids, out.finish_reasons, strict=True):
        kept = ids[:-1] if reason == "stop" else ids
        assert text == target.tokenizer.decode(kept, skip_special_tokens=True)


def test_the_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    """Also where it is an ordinary token; special tokens inside are left out of the text."""
    target = text_target()
    free = generate(target, None, ["hello"], max_new_tokens=12, stop_token_ids=())
    ids = free.token_ids[0]
    at = next(i for i in range(4, 12) if ids[i] not in ids[:i])
    out = generate(target, None, ["hello"], max_new_tokens=12, stop_token_ids=(ids[at],))
    assert out.finish_reasons == ["stop"]
    assert out.token_ids == [ids[: at + 1]]
    assert out.text == [target.tokenizer.decode(ids[:at], skip_special_tokens=True)]
    assert decode_ids(target, [END, *target.tokenizer.encode("hi"), END]) == "hi"


def test_spaces_are_not_cleaned_up() -> None:
    tokenizer = as_transformers(byte_level(bytes(range(256))))
    tokenizer.clean_up_tokenization_spaces = True
    target = dataclasses.replace(tiny_target(), tokenizer=tokenizer)
    assert decode_ids(target, tokenizer.encode("so , he did n't .")) == "so , he did n't ."


def test_an_empty_budget_gives_an_empty_text() -> None:
    out = generate(text_target(), tiny_drafter(), ["hello"], max_new_tokens=0)
    assert (out.token_ids, out.text, out.finish_reasons) == ([[]], [""], ["length"])


# --- a drafter that does not help


def useless_drafter() -> Drafter:
    """Drafts one token, the mask, all the time: its last norm is zero."""
    drafter = tiny_drafter()
    params = {**drafter.params, "norm": {"scale": 0 * drafter.params["norm"]["scale"]}}
    return dataclasses.replace(drafter, params=params)


def test_zero_acceptance_over_many_cycles_warns() -> None:
    target, drafter = tiny_target(), useless_drafter()
    prompts = random_prompts([2, 3])
    options = {"stop_token_ids": (), "max_new_tokens": USELESS_CYCLES // 2 + 1}
    with pytest.warns(UserWarning, match=f"no draft accepted in {USELESS_CYCLES} cycles") as caught:
        out = generate(target, drafter, prompts, **options)
    assert caught[0].filename == __file__
    assert out.mean_acceptance_length == 1.0
    with pytest.warns(UserWarning, match="no draft accepted"):
        list(stream(target, drafter, prompts[0], stop_token_ids=(), max_new_tokens=80))


def test_no_warning_without_reason() -> None:
    target, prompts = tiny_target(), random_prompts([2, 3])
    options = {"stop_token_ids": (), "max_new_tokens": USELESS_CYCLES // 2 + 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = generate(target, None, prompts, **options)
        generate(target, useless_drafter(), prompts, block_size=1, **options)
        fewer = options | {"max_new_tokens": USELESS_CYCLES // 2}
        generate(target, useless_drafter(), prompts, **fewer)
        scripts = [p + ids for p, ids in zip(prompts, plain.token_ids, strict=True)]
        out = generate(target, stub(target, scripts, ORACLE), prompts, **options)
        generate(target, stub(target, scripts, 0), prompts, **options)
    assert out.mean_acceptance_length == BLOCK
    assert out.token_ids == plain.token_ids


def test_the_template_of_this_file_is_the_rendered_one() -> None:
    """Guards the constants above: a template that ignores thinking would make tests vacuous."""
    assert "enable_thinking" in CHATML
    assert encode_prompt(text_target(), CHAT, False) != encode_prompt(text_target(), CHAT)
