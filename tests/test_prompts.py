"""Prompts by rule: the same for a seed, enough of them, none from HumanEval or held-out rows."""

import ast
import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.conversations import Conversation, is_held_out, read_conversations
from train.heldout import humaneval_problems
from train.prompts import completion, rewriting
from train.prompts.avoid import WORDS, Avoid, runs_of_words
from train.prompts.families import FAMILIES, choose, family_texts, write
from train.word_problems import word_problems

RUNS = [
    [f"The sentence number {i} has some words.", f"Here is one more of them, {i} in all."][
        : 1 + i % 2
    ]
    for i in range(400)
]
PROBLEM = {
    "prompt": 'def add(x: int, y: int):\n    """Add two numbers x and y, and give back what their '
    'sum is once both are known"""\n',
    "entry_point": "add",
}


def first(family: str, count: int, seed: int = 0) -> list[str]:
    return list(itertools.islice(family_texts(family, seed, RUNS), count))


@pytest.fixture(scope="module")
def problems() -> list[dict]:
    return humaneval_problems()


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_follow_the_seed_and_leave_no_gap(family: str) -> None:
    texts = first(family, 300)
    assert texts == first(family, 300)
    assert texts != first(family, 300, seed=1)
    assert len(set(texts)) > 250
    for text in texts:
        assert text == text.strip()
        assert not re.search(r"\{[a-z]+\d?\}", re.sub(r"(?s)(def|class) .*", "", text)), text


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "completion"])
def test_thousands_of_each(family: str, problems: list[dict]) -> None:
    avoid = Avoid(problems, [problem.text for problem in word_problems()])
    chosen, left_out = choose(family_texts(family, 0, RUNS), 4000, avoid)
    assert len(set(chosen)) == 4000
    assert set(left_out) <= {"repeated"}


def test_completion_shows_header_and_docstring_but_no_body() -> None:
    source = '''
import os

def area(width: float, height: float = 1.0, *rest, unit="m") -> float:
    """The area of a rectangle.

    Both sides are lengths.
    """
    return width * height

def _private(x):
    """A helper that nobody should see."""
    return x

def only_documented(x):
    """It has nothing but this docstring."""

def undocumented(x):
    return x

class Box:
    @property
    def weight(self):
        """The weight of the box in kilograms."""
        return self._weight
'''
    found = dict(completion.functions(source))
    assert found == {
        "area": "def area(width: float, height: float=1.0, *rest, unit='m') -> float:\n"
        '    """The area of a rectangle.\n\n    Both sides are lengths.\n    """',
        "weight": "class Box:\n    def weight(self):\n"
        '        """The weight of the box in kilograms."""',
    }
    for code in found.values():
        ast.parse(code)
    assert list(completion.functions("def broken(:")) == []


def test_the_standard_library_has_enough_functions(problems: list[dict]) -> None:
    functions = completion.stdlib_functions()
    assert len(functions) > 1000
    for _, code in functions[:: len(functions) // 50]:
        body = ast.parse(code).body[0]
        inner = body.body[0] if isinstance(body, ast.ClassDef) else body
        assert isinstance(inner, ast.FunctionDef)
        assert len(inner.body) == 1
        assert ast.get_docstring(inner)
    chosen, left_out = choose(completion.texts(random.Random(0)), 500, Avoid(problems))
    assert len(chosen) == 500
    assert sum(left_out.values()) < 50


def test_human_eval_is_recognised(problems: list[dict]) -> None:
    assert len(problems) == 164
    avoid = Avoid(problems)
    for problem in problems[::8]:
        assert avoid.reason(f"Complete this:\n\n{problem['prompt']}")
        words = problem["prompt"].split('"""')[-2] if '"""' in problem["prompt"] else ""
        if runs_of_words(words):
            assert Avoid([{**problem, "entry_point": ""}]).reason(f"Write code. {words}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def add(a, b):", "a function of HumanEval"),
        ("Write a function called `add`.", "a function of HumanEval"),
        ("Write `add` please.", "a function of HumanEval"),
        ("Add 2 and 3, then add 4.", None),
        (
            "ADD two numbers: x and y, and give back what their sum is, once",
            f"{WORDS} words of HumanEval",
        ),
        ("add two numbers x and y and give back what their sum", None),  # twelve
        ("who?", "a held-out prompt"),
        ("who? me", None),
        ("so " + " ".join("abcdefghijklm"), f"{WORDS} words of a held-out prompt"),
    ],
)
def test_what_is_avoided(text: str, reason: str | None) -> None:
    avoid = Avoid([PROBLEM], [" who?\n", " ".join("abcdefghijklmno")])
    assert avoid.reason(text) == reason


def test_left_out_texts_are_counted() -> None:
    texts = iter(["a", "a", "def add(x):", "b", "c", "d"])
    chosen, left_out = choose(texts, 3, Avoid([PROBLEM]))
    assert chosen == ["a", "b", "c"]
    assert left_out == {"repeated": 1, "a function of HumanEval": 1}
    assert choose(itertools.repeat("a"), 3, Avoid())[0] == ["a"]  # exhausted, it ends


def test_sentences_are_plain() -> None:
    text = (
        "I think that this is a rather good sentence. see http://x.com for more of it.\n"
        "Is this the second of the sentences? x = [1, 2]"
    )
    talk = Conversation("c", [{"role": "user", "content": text}])
    assert list(rewriting.sentences([talk], 0.0)) == [
        ["I think that this is a rather good sentence.", "Is this the second of the sentences?"]
    ]


def test_sentences_are_not_held_out() -> None:
    texts = [f"This is the plain sentence number {i} of all." for i in range(60)]
    talks = [Conversation("c", [{"role": "user", "content": text}]) for text in texts]
    kept = [run[0] for run in rewriting.sentences(talks, 0.3)]
    assert kept == [text for text in texts if not is_held_out(text, 0.3)]
    assert 20 < len(kept) < 60


def test_files_are_conversations_that_name_their_family(tmp_path: Path) -> None:
    write(tmp_path / "x" / "coding.jsonl", "coding", ["one é", "two"])
    read = list(read_conversations(tmp_path / "x" / "coding.jsonl", need_assistant=False))
    assert [c.id for c in read] == ["coding/000000", "coding/000001"]
    assert read[0].messages == [{"role": "user", "content": "one é"}]


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/make_prompts.py", f"--out={tmp_path}", "--count=30"]
    options = ["--families=arithmetic,coding", "--seed=3"]
    first_run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert "164 HumanEval problems, 200 held-out prompts" in first_run.stdout
    assert "arithmetic.jsonl: 30 prompts" in first_run.stdout
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(files) == ["arithmetic.jsonl", "coding.jsonl"]
    assert all(text.count("\n") == 30 for text in files.values())
    bad = subprocess.run([*command, "--families=poems"], capture_output=True, text=True)
    assert bad.returncode != 0
    assert "['poems'] are not among" in bad.stdout + bad.stderr
