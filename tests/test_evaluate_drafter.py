"""scripts/evaluate_drafter.py on tiny models: cells, numbers against own runs, files continued."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags
from rich.console import Console

from dflash_jax.errors import DFlashError
from dflash_jax.generation import Request, SamplingParams, generate_ids
from infer.timing import TimedRun, timed_run
from scripts import evaluate_drafter as command
from scripts import evaluation
from tests.rigs import tiny_drafter
from tests.text_rigs import text_target
from train.acceptance import summarize_acceptance
from train.heldout import HeldOutSet
from train.regenerate import RegenerateSettings

NEW = 12
BASE = ("--target=tiny", "--drafter=small", f"--max_new_tokens={NEW}", "--block_sizes=4")


def tiny_set(name: str, chat: Any, held_out_fraction: float) -> HeldOutSet:
    """Three prompts."""
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(3, 100, size).tolist() for size in (3, 9, 17)]
    fraction = held_out_fraction if name == "sharegpt" else None
    return HeldOutSet(name, [f"{name}/{i}" for i in range(3)], prompts, fraction)


@pytest.fixture(autouse=True)
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(command, "load_target", lambda name, dtype: text_target())
    monkeypatch.setattr(command, "load_drafter", lambda name, target, dtype: tiny_drafter())
    monkeypatch.setattr(command, "held_out_set", tiny_set)
    monkeypatch.setattr(command, "copy_bandwidth", lambda size: 1e9)


def parse(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    command.define_flags(values)
    values(["evaluate_drafter", *BASE, *arguments])
    return values


def evaluate(*arguments: str) -> dict[str, Any]:
    return command.evaluate(parse(*arguments), arguments, Console(quiet=True))


def own_run(name: str, temperature: float, policy: str = "argmax") -> dict[str, Any]:
    """What a cell must say of the acceptance: each prompt alone, with its own seed."""
    prompts = tiny_set(name, None, 0.04)
    settings = RegenerateSettings(temperature=temperature)
    outputs = [
        generate_ids(
            text_target(),
            tiny_drafter(),
            [ids],
            sampling=SamplingParams(temperature, seed=settings.sampling(key).seed),
            max_new_tokens=NEW,
            block_size=4,
            draft_policy=policy,
        )
        for key, ids in zip(prompts.ids, prompts.prompt_ids, strict=True)
    ]
    return summarize_acceptance(outputs, 4)


def test_cells_of_the_flags() -> None:
    options = parse("--draft_policy=argmax,coupled", "--temperatures=0,1", "--batch_sizes=1,8,1")
    cells = command.make_cells(options, 8)
    assert len(cells) == len(set(cells)) == 3 * 2 * (1 + 2)  # greedy: one policy
    assert {c.draft_policy for c in cells if not c.temperature} == {"argmax"}
    alone = command.make_cells(parse("--tau_only", "--sets=humaneval"), 8)
    assert [c.key for c in alone] == [
        "humaneval, T 0, tau, block 4, argmax",
        "humaneval, T 1, tau, block 4, argmax",
    ]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sets=gsm8k", "sets: 'gsm8k' is not one of sharegpt"),
        ("--draft_policy=best", "draft_policy: 'best' is not one of argmax, coupled"),
        ("--block_sizes=16", r"block_sizes: 16 is not in 2\.\.8"),
        ("--block_sizes=1", r"block_sizes: 1 is not in 2\.\.8"),
        ("--batch_sizes=0", "batch_sizes: 0 must be >= 1"),
        ("--temperatures=warm", "temperatures: could not convert"),
        ("--sets=", "sets: at least one"),
        ("--target=", "target: must be given"),
    ],
)
def test_values_that_are_not_possible(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(flag)


def test_acceptance_of_all_prompts(tmp_path: Path) -> None:
    """One refilled batch of two rows for all cells, and yet each prompt is as if alone."""
    path = tmp_path / "out.json"
    result = evaluate(
        "--tau_only",
        "--sets=sharegpt,humaneval",
        "--draft_policy=argmax,coupled",
        "--refill_batch_size=2",
        f"--output={path}",
    )
    assert json.loads(path.read_text()) == result
    assert len(result["cells"]) == 6
    for cell in result["cells"].values():
        expected = own_run(cell["set"], cell["temperature"], cell["draft_policy"])
        assert cell["acceptance"] == expected
        assert "comparison" not in cell
    settings = [cell["settings"] for cell in result["cells"].values()]
    assert {s["held_out_fraction"] for s in settings} == {0.04, None}
    assert result["run"]["dtype"] == "float32"
    assert result["drafter"] == "small"


def test_timed_cells(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = evaluate("--sets=humaneval", "--batch_sizes=2", f"--output={path}", "--repeats=2")
    assert list(result["cells"]) == [f"humaneval, T {t}, batch 2, block 4, argmax" for t in (0, 1)]
    for cell in result["cells"].values():
        # Three prompts: the second batch of two is filled up. That row is timed, not counted twice.
        assert cell["identical"] == {"rows": 4, "different": 0, "fraction": 1.0}
        assert cell["acceptance"] == own_run("humaneval", cell["temperature"])
        rates = [cell[way]["tokens_per_second"]["median"] for way in ("plain", "speculative")]
        assert cell["comparison"]["speedup"] == pytest.approx(rates[1] / rates[0])
        assert cell["settings"]["num_slots"] == 128
        assert cell["settings"]["prompts"] == 3


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out.json"
    arguments = ("--tau_only", "--refill_batch_size=2", f"--output={path}")
    measured: list[list[str]] = []

    def one_then_killed(run, cells, *rest):
        measured.append([cell.key for cell in cells])
        yield from [next(iter(original(run, cells, *rest)))]
        raise KeyboardInterrupt

    original = evaluation.measure_acceptance
    monkeypatch.setattr(command, "measure_acceptance", one_then_killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*arguments, "--sets=humaneval")
    first = json.loads(path.read_text())
    assert len(first["cells"]) == 1

    def counted(run, cells, *rest):
        measured.append([cell.key for cell in cells])
        return original(run, cells, *rest)

    monkeypatch.setattr(command, "measure_acceptance", counted)
    second = evaluate(*arguments, "--sets=humaneval")
    assert len(measured[0]) == 2
    assert set(measured[1]) == set(measured[0]) - set(first["cells"])
    assert second["cells"].items() >= first["cells"].items()
    # With other prompts a cell is measured again, and the others stay.
    third = evaluate(*arguments, "--sets=humaneval", "--temperatures=0", "--num_prompts=2")
    assert measured[2] == ["humaneval, T 0, tau, block 4, argmax"]
    assert third["cells"][measured[2][0]]["acceptance"]["prompts"] == 2
    assert len(third["cells"]) == 2
    assert len(third["earlier_commands"]) == 1
    with pytest.raises(DFlashError, match=r"out\.json: max_new_tokens was 12, is 6 now"):
        evaluate(*arguments, "--max_new_tokens=6")
    path.write_text("[]")
    with pytest.raises(DFlashError, match=r"out\.json: not a file of this command"):
        evaluate(*arguments)


def test_rows_that_part_have_their_margins(monkeypatch) -> None:
    """Only the batches with such a row run again; sampled rows have no margin to speak of."""
    asked = []

    def margins(plain: list[Request], speculative: list[Request]) -> list[float]:
        asked.append([[len(request.prompt_length_B) for request in (*plain, *speculative)]])
        assert plain[0].spec.proposer is None
        assert speculative[0].spec.proposer is not None
        return [0.25]

    def run(request: Request) -> TimedRun:
        taken = timed_run(request)
        if request.spec.proposer is not None and request.prompt_length_B[0] == 17:
            taken.output.token_ids[0][-1] += 1
        return taken

    monkeypatch.setattr(evaluation, "timed_run", run)
    monkeypatch.setattr(evaluation, "margins_where_parted", margins)
    with pytest.raises(DFlashError, match="2 rows differ"):
        evaluate("--sets=humaneval", "--batch_sizes=1")
    assert asked == [[[1, 1]]]


def test_different_ids_in_float32_are_an_error(monkeypatch) -> None:
    different = {"rows": 3, "different": 1, "fraction": 2 / 3}
    monkeypatch.setattr(evaluation, "count_identical", lambda one, other: different)
    with pytest.raises(DFlashError, match="1 rows differ between plain and speculative"):
        evaluate("--sets=humaneval", "--temperatures=0", "--batch_sizes=2")


def test_lists_of_numbers_take_one_line(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    evaluate("--tau_only", "--sets=humaneval", "--temperatures=0", f"--output={path}")
    (line,) = [line for line in path.read_text().splitlines() if '"acceptance_by_slot"' in line]
    assert line.endswith("],")
