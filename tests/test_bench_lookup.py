"""scripts/bench_lookup.py: Transformers on our own target's weights gives our own ids."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
from absl import flags
from rich.console import Console

from dflash_jax.generation import generate_ids
from dflash_jax.target import Target
from scripts import bench_lookup as command
from tests.rigs import tiny_target
from tests.test_evaluate_drafter import tiny_set
from tests.text_rigs import text_target

NEW = 24


@cache
def target(model_type: str) -> Target:
    same = text_target()
    return dataclasses.replace(
        tiny_target(model_type), tokenizer=same.tokenizer, stop_token_ids=same.stop_token_ids
    )


@pytest.fixture(autouse=True)
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(command, "load_target", lambda name, dtype: target(name))
    monkeypatch.setattr(command, "held_out_set", lambda name, chat: tiny_set(name, chat, 0.04))


def benchmark(*arguments: str) -> dict:
    values = flags.FlagValues()
    command.define_flags(values)
    values(["bench_lookup", "--target=qwen3", f"--max_new_tokens={NEW}", *arguments])
    return command.benchmark(values, list(arguments), Console(quiet=True))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_every_way_gives_our_ids(tmp_path: Path, monkeypatch, model_type: str) -> None:
    answers = []
    original = command.measure

    def recorded(*arguments):
        numbers = original(*arguments)
        answers.append(list(numbers["token_ids"]))
        return numbers

    monkeypatch.setattr(command, "measure", recorded)
    path = tmp_path / "out.json"
    result = benchmark(f"--target={model_type}", f"--output={path}", "--dtype=float32")
    assert json.loads(path.read_text()) == result
    prompts = tiny_set("humaneval", None, 0.04).prompt_ids
    ours = generate_ids(target(model_type), None, prompts, max_new_tokens=NEW).token_ids
    assert answers == [ours] * 3
    assert list(result["ways"]) == ["eager", "lookup", "compiled"]
    for numbers in result["ways"].values():
        assert numbers["tokens"] == sum(map(len, ours))
        assert numbers["tokens_per_second"] == numbers["tokens"] / numbers["seconds"]
        assert numbers["same_as_first"] == 3
    assert result["prompts"] == 3
    assert result["hardware"]["backend"] == "cpu"


def test_sampled_runs_follow_their_seed() -> None:
    options = ("--temperature=1", "--ways=eager", "--num_prompts=2", "--dtype=float32")
    first, again = benchmark(*options), benchmark(*options)
    assert first["ways"]["eager"]["tokens"] == again["ways"]["eager"]["tokens"]
    assert command.generate_options("lookup", 7, 1.0) == {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "prompt_lookup_num_tokens": 7,
    }
    assert command.generate_options("compiled", 7, 0.0)["cache_implementation"] == "static"


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--ways=fast", "ways: 'fast' is not one of eager"), ("--target=", "target: must be given")],
)
def test_values_that_are_not_possible(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        benchmark(flag)
