"""Streamed pieces: they concatenate to the text of `generate`, for every kind of tokenizer."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.target import Target
from infer import SamplingParams, generate, stream
from infer.generate import decode_ids
from infer.stream import REPLACEMENT, Detokenizer
from tests.rigs import BLOCK, ORACLE, stub, tiny_drafter, tiny_target
from tests.text_rigs import as_transformers, byte_level, sentencepiece_like, text_target

PROMPT = "hello"
OPTIONS = {"max_new_tokens": 40, "sampling": SamplingParams(1.0, seed=1)}


@cache
def reference():
    """Plain generation, whole."""
    return generate(text_target(), None, [PROMPT], **OPTIONS)


def drafters():
    target = text_target()
    prompt = target.tokenizer.encode(PROMPT)
    script = [prompt + reference().token_ids[0]]
    return {
        "plain": None,
        "dflash": tiny_drafter(),
        "oracle": stub(target, script, ORACLE),
        "partial3": stub(target, script, 3),
    }


# --- the whole way


@pytest.mark.parametrize("cycles_per_step", [1, 3, 1000])
@pytest.mark.parametrize("name", ["plain", "dflash", "oracle", "partial3"])
def test_pieces_concatenate_to_the_text_of_generate(name: str, cycles_per_step: int) -> None:
    target, drafter = text_target(), drafters()[name]
    whole = generate(target, drafter, [PROMPT], **OPTIONS)
    assert whole.text == reference().text
    pieces = stream(target, drafter, PROMPT, cycles_per_step=cycles_per_step, **OPTIONS)
    texts = list(pieces)
    assert "".join(texts) == whole.text[0]
    assert all(texts)
    assert pieces.output == whole
    assert list(pieces) == []
    as_ids = stream(
        target, drafter, PROMPT, cycles_per_step=cycles_per_step, as_ids=True, **OPTIONS
    )
    ids = list(as_ids)
    assert [*chain(*ids)] == whole.token_ids[0]
    assert as_ids.output == whole
    # The first token comes from the prefill, then so many cycles a piece.
    lengths = whole.acceptance_lengths[0]
    steps = [lengths[i : i + cycles_per_step] for i in range(0, len(lengths), cycles_per_step)]
    assert [len(piece) for piece in ids] == [1, *map(sum, steps)]


def test_the_reference_is_worth_streaming() -> None:
    """Characters of several bytes and broken ones, or the tests above would show little."""
    text = reference().text[0]
    assert REPLACEMENT in text
    assert len(text) > 20
    assert max(drafters_lengths()) == BLOCK


def drafters_lengths() -> list[int]:
    return generate(text_target(), drafters()["oracle"], [PROMPT], **OPTIONS).acceptance_lengths[0]


@pytest.mark.parametrize("at", [0, 1, 7, 8, 20])
def test_the_stop_token_ends_the_stream_and_is_not_in_the_text(at: int) -> None:
    target, drafter = text_target(), drafters()["partial3"]
    ids = reference().token_ids[0]
    stop = (ids[at],)
    end = ids.index(ids[at])
    options = OPTIONS | {"stop_token_ids": stop}
    pieces = stream(target, drafter, PROMPT, **options)
    assert "".join(pieces) == target.tokenizer.decode(ids[:end], skip_special_tokens=True)
    assert pieces.output == generate(target, drafter, [PROMPT], **options)
    assert pieces.output.finish_reasons == ["stop"]
    as_ids = stream(target, drafter, PROMPT, as_ids=True, **options)
    assert [*chain(*as_ids)] == ids[: end + 1]


def test_options_reach_the_stream() -> None:
    target, drafter = text_target(), tiny_drafter()
    chat = [{"role": "user", "content": "hi"}]
    options = {
        "sampling": SamplingParams(0.8, 10, 0.9, 5),
        "max_new_tokens": 11,
        "block_size": 4,
        "draft_policy": "coupled",
        "logprobs": True,
        "enable_thinking": False,
    }
    pieces = stream(target, drafter, chat, **options)
    text = "".join(pieces)
    whole = generate(target, drafter, [chat], **options)
    assert pieces.output == whole
    assert whole.text == [text]
    assert whole.logprobs is not None


def test_a_target_without_tokenizer_streams_ids() -> None:
    pieces = stream(tiny_target(), tiny_drafter(), [1, 2, 3], max_new_tokens=9, stop_token_ids=())
    ids = list(pieces)
    assert [*chain(*ids)] == pieces.output.token_ids[0]
    assert pieces.output.text is None


@pytest.mark.parametrize("budget", [0, 1])
def test_hardly_any_budget(budget: int) -> None:
    pieces = stream(text_target(), tiny_drafter(), PROMPT, **OPTIONS | {"max_new_tokens": budget})
    assert "".join(pieces) == pieces.output.text[0]
    assert len(pieces.output.token_ids[0]) == budget


def test_a_dropped_stream_leaves_nothing_behind() -> None:
    """Long, dropped after three pieces, short, long again: each equals a fresh one."""
    target, drafter = text_target(), tiny_drafter()
    long, short = {**OPTIONS, "max_new_tokens": 40}, {**OPTIONS, "max_new_tokens": 5}

    def finished(options):
        pieces = stream(target, drafter, PROMPT, **options)
        return "".join(pieces), pieces.output

    fresh_long, fresh_short = finished(long), finished(short)
    dropped = stream(target, drafter, PROMPT, **long)
    taken = [next(dropped) for _ in range(3)]
    other = stream(target, drafter, "a é", **long)  # two at a time
    next(other)
    assert finished(short) == fresh_short
    assert finished(long) == fresh_long
    assert "".join([*taken, *dropped]) == fresh_long[0]
    assert dropped.output == fresh_long[1]
    del other


def test_the_output_is_there_at_the_end_only() -> None:
    pieces = stream(text_target(), None, PROMPT, **OPTIONS)
    with pytest.raises(RuntimeError, match="has not finished"):
        _ = pieces.output
    next(pieces)
    with pytest.raises(RuntimeError, match="has not finished"):
        _ = pieces.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cycles_per_step": 0}, "cycles_per_step: 0"),
        ({"cycles_per_step": 1.5}, "cycles_per_step: 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1"),
        ({"stop_token_ids": (500,)}, "stop_token_ids: 500"),
        ({"draft_policy": "random"}, "draft_policy: 'random'"),
    ],
)
def test_errors_come_at_once(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(text_target(), None, PROMPT, **options)


# --- detokenisation


@cache
def targets() -> dict[str, Target]:
    tokenizers = {
        "byte-level": byte_level(bytes(range(256)), (("h", "e"), ("Ġ", "a"), ("ð", "Ł"))),
        "sentencepiece": sentencepiece_like(),
        "metaspace": sentencepiece_like(metaspace=True),
    }
    return {
        name: dataclasses.replace(tiny_target(), tokenizer=as_transformers(tokenizer), name=name)
        for name, tokenizer in tokenizers.items()
    }


def pieces_of(target: Target, ids: list[int], sizes: list[int]) -> list[str]:
    """Pushes `ids` in groups of these sizes (repeated), then finishes."""
    detokenizer, at, turn = Detokenizer(target), 0, 0
    pieces: list[str] = []
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish(decode_ids(target, ids))]


TEXT = st.text(st.sampled_from("ab .hé€😀👩\u200d🚀\n\ufffd▁"), max_size=20)
# Whole texts, and ids at random: broken characters, special tokens, ids without a token.
PARTS = st.lists(st.one_of(TEXT, st.lists(st.integers(0, 300), max_size=6)), max_size=5)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(parts=PARTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@example(parts=["😀é€"], sizes=[1])
@example(parts=[[0, 1, 2], " a", [2], " b"], sizes=[1])
@example(parts=["é", [3 + 0xE2], "a"], sizes=[1])
def test_pieces_concatenate_to_the_decoded_whole(name: str, parts, sizes: list[int]) -> None:
    target = targets()[name]
    encode = target.tokenizer.encode
    ids = [*chain(*(encode(p) if isinstance(p, str) else p for p in parts))]
    pieces = pieces_of(target, ids, sizes)
    assert "".join(pieces) == target.tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
def test_nothing_is_held_back_longer_than_needed(name: str) -> None:
    """Token by token, what has come out is the text so far, but for a character not yet whole."""
    target = targets()[name]
    text = "a b é😀 ab. " * 20
    ids = target.tokenizer.encode(text)
    detokenizer, out = Detokenizer(target), ""
    for n, token in enumerate(ids, 1):
        out += detokenizer.push([token])
        so_far = target.tokenizer.decode(ids[:n], skip_special_tokens=True)
        last = target.tokenizer.convert_ids_to_tokens(token)
        if last.startswith("<0x"):
            assert so_far.rstrip(REPLACEMENT).startswith(out)
        else:
            assert out == so_far.rstrip(REPLACEMENT)
    assert out + detokenizer.finish(text) == text


def test_a_step_decodes_a_short_window() -> None:
    """The cost of a step does not grow with the text."""
    target = targets()["byte-level"]
    sizes: list[int] = []

    class Counting:
        all_special_ids = target.tokenizer.all_special_ids
        convert_ids_to_tokens = staticmethod(target.tokenizer.convert_ids_to_tokens)

        @staticmethod
        def decode(ids, **options):
            sizes.append(len(ids))
            return target.tokenizer.decode(ids, **options)

    ids = target.tokenizer.encode("he said 😀 a lot " * 50)
    counting = dataclasses.replace(target, tokenizer=Counting())
    pieces = pieces_of(counting, ids, [2])
    assert "".join(pieces) == "he said 😀 a lot " * 50
    assert max(sizes[:-1]) <= 8  # the last is the whole text, for `finish`


def test_a_tokenizer_that_rewrites_its_text_is_an_error() -> None:
    """Here: the longer list decodes to capitals."""
    tokenizer = types.SimpleNamespace(
        all_special_ids=[],
        convert_ids_to_tokens=str,
        decode=lambda ids, **_: "ab"[: len(ids)] if len(ids) < 3 else "ABC",
    )
    target = dataclasses.replace(tiny_target(), tokenizer=tokenizer, name="shouting")
    detokenizer = Detokenizer(target)
    assert [detokenizer.push([1]), detokenizer.push([2])] == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"'shouting' decodes a longer list.*as_ids"):
        detokenizer.finish("ABC")
