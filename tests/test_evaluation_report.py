"""README tables and figure of made-up evaluations: what was measured is shown, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from scripts import plot_results
from scripts.evaluation_report import evaluation_block, evaluation_figure


def cell(
    name: str,
    temperature: float,
    batch: int | None,
    tau: float,
    speedup: float | None = None,
    block: int = 16,
    policy: str = "argmax",
) -> dict[str, Any]:
    by_slot = [tau / 10 / k for k in range(1, block)]
    record: dict[str, Any] = {
        "set": name,
        "temperature": temperature,
        "batch_size": batch,
        "block_size": block,
        "draft_policy": policy,
        "settings": {"prompts": 50 if batch is None else 8, "prompts_sha256": "abc"},
        "acceptance": {
            "prompts": 50 if batch is None else 8,
            "looping": 7,
            "tau": tau + 0.5,
            "tau_other": tau,
            "acceptance_by_slot_other": by_slot,
        },
    }
    if speedup is not None:
        record["comparison"] = {"speedup": speedup}
        for way, rate in (("plain", 100.0), ("speculative", 100.0 * speedup)):
            record[way] = {"tokens_per_second": {"median": rate}}
    return record


def result(backend: str, *cells: dict[str, Any]) -> dict[str, Any]:
    device = "cpu" if backend == "cpu" else "NVIDIA H200"
    return {
        "date": "2026-12-01T02:00:00+00:00",
        "versions": {"jax": "0.10.2"},
        "hardware": {"backend": backend, "device": device, "cores": 2},
        "drafter": "small",
        "run": {"target": "tiny", "dtype": "float32", "max_new_tokens": 512},
        "cells": {str(i): cell for i, cell in enumerate(cells)},
    }


CPU = result(
    "cpu",
    cell("humaneval", 0.0, 1, 4.1, 1.6),
    cell("humaneval", 0.0, 1, 3.9, 1.7, block=8),
    cell("humaneval", 0.0, 8, 4.1, 0.8),
)
GPU = result(
    "gpu",
    cell("humaneval", 0.0, None, 4.2),
    cell("humaneval", 1.0, None, 3.5),
    cell("humaneval", 1.0, None, 3.75, policy="coupled"),
    cell("sharegpt", 0.0, None, 3.3),
    cell("humaneval", 0.0, 1, 4.4, 2.6),
)
LOOKUP = {
    "hardware": {"backend": "gpu", "device": "NVIDIA H200"},
    "set": "humaneval",
    "temperature": 0.0,
    "batch_size": 1,
    "max_new_tokens": 512,
    "prompts_sha256": "abc",
    "ways": {"eager": {"tokens_per_second": 40.4}, "lookup": {"tokens_per_second": 61.2}},
}


def test_everything_measured() -> None:
    text = evaluation_block([CPU, GPU], [LOOKUP], "docs/figures/e.svg")
    lines = text.splitlines()
    assert lines[0] == "![acceptance by slot and speedup on held-out sets](docs/figures/e.svg)"
    head = "| held-out set | T | tau | with answers that loop | batch | "
    assert head + "speedup, 2 CPU cores | speedup, H200 |" in lines
    # tau of the largest block over the most prompts; the faster block's speedup.
    row = "| HumanEval | 0 | 4.20 | 4.70 (7 of 50 loop) | 1 | 1.70x (block 8) | 2.60x (block 16) |"
    assert row in lines
    assert lines[lines.index(row) + 1] == "| HumanEval | 0 |  |  | 8 | 0.80x (block 16) | - |"
    assert "| HumanEval | 1 | 3.50 | 4.00 (7 of 50 loop) |  | - | - |" in lines
    assert "| ShareGPT | 0 | 3.30 | 3.80 (7 of 50 loop) |  | - | - |" in lines
    assert "word problems" not in text
    assert lines.index("| ShareGPT | 0 | 3.30 | 3.80 (7 of 50 loop) |  | - | - |") < lines.index(
        row
    )
    assert "| HumanEval | 1 | 3.50 | 3.75 |" in lines
    assert "| H200, HumanEval, T = 0, batch 1 | tokens/s |" in lines
    tail = ["| Transformers, `generate` | 40 |", "| Transformers, prompt lookup | 61 |"]
    assert lines[-4:] == [*tail, "| dflash-jax, plain | 100 |", "| dflash-jax, block 16 | 260 |"]
    assert "ShareGPT 50, HumanEval 50; at most 512 new tokens" in text
    assert "2 CPU cores in float32 (jax 0.10.2, 2026-12-01); H200 in float32" in text


def test_only_some_measured() -> None:
    assert evaluation_block([], [LOOKUP], "x") == ""
    alone = result("gpu", cell("word_problems", 0.0, None, 2.0))
    lines = evaluation_block([alone], [], "x").splitlines()
    assert "| held-out set | T | tau | with answers that loop |" in lines
    assert "| word problems | 0 | 2.00 | 2.50 (7 of 50 loop) |" in lines
    assert not any("speedup," in line or "coupled" in line for line in lines)
    # Numbers of another machine or of other prompts are not put beside Transformers'.
    for results, lookup in (([CPU], LOOKUP), ([GPU], {**LOOKUP, "prompts_sha256": "def"})):
        lines = evaluation_block(results, [lookup], "x").splitlines()
        assert lines[-1] == "| Transformers, prompt lookup | 61 |"


@pytest.mark.parametrize(
    ("results", "shown", "hidden"),
    [
        ([CPU, GPU], ["accept the slot", "speedup, greedy"], []),
        ([result("gpu", cell("sharegpt", 0.0, None, 3.0))], ["accept the slot"], ["greedy"]),
    ],
)
def test_figure(tmp_path: Path, monkeypatch, results, shown, hidden) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    first, again = tmp_path / "a.svg", tmp_path / "b.svg"
    evaluation_figure(results, first)
    evaluation_figure(results, again)
    text = first.read_text()
    assert again.read_text() == text
    assert all(part in text for part in shown)
    assert not any(part in text for part in hidden)


def test_readme_has_a_place_for_each_table() -> None:
    readme = "a\n<!-- evaluation -->\nold\n<!-- /evaluation -->\nb\n"
    new = plot_results.with_table(readme, "evaluation", "table")
    assert new == "a\n<!-- evaluation -->\ntable\n<!-- /evaluation -->\nb\n"
    assert plot_results.with_table(new, "evaluation", "table") == new
    with pytest.raises(ValueError, match="<!-- results --> and <!-- /results --> once each"):
        plot_results.with_table(readme, "results", "table")


def test_readme_says_what_the_results_say() -> None:
    trained, shipped = (plot_results.read_results(f"{n}_cpu.json")[0] for n in ("demo", "shipped"))
    readme = (plot_results.ROOT / "README.md").read_text(encoding="utf-8")
    table = plot_results.demo_table(trained, shipped)
    assert plot_results.with_table(readme, "results", table) == readme
