"""Figures and tables of the README, from the recorded results.

    python scripts/plot_results.py          writes docs/figures and README.md
    python scripts/plot_results.py --check  exits with 1 if README.md is not what the results say

README.md holds the demo's table between `<!-- results -->` and `<!-- /results -->`, and what
`docs/results/evaluation_*.json` and `transformers_lookup_*.json` say between `<!-- evaluation -->`
and `<!-- /evaluation -->`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from scripts.evaluation_report import evaluation_block, evaluation_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "figures" / "demo.svg"
EVALUATION_FIGURE = ROOT / "docs" / "figures" / "evaluation.svg"

_CHECK = flags.DEFINE_bool("check", False, "Only compare README.md with the results.")


def demo_table(trained: dict[str, Any], shipped: dict[str, Any]) -> str:
    """The demo's numbers as Markdown, one column a drafter."""

    def number(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{value:.2f}{unit}"

    def column(result: dict[str, Any]) -> list[str]:
        same = result["identical"]
        return [
            f"{result['plain_tokens_per_second']:.1f} tokens/s",
            f"{result['tokens_per_second']:.1f} tokens/s",
            number(result["speedup"], "x"),
            f"{sum(same)} of {len(same)}",
            number(result["mean_acceptance_length"]),
            f"{number(result['mean_acceptance_length_other'])} ({result['looping']} loop)",
            number(result["break_even_acceptance"]),
        ]

    names = (
        "plain decoding",
        "speculative decoding",
        "speedup",
        "identical answers",
        "mean acceptance length",
        "without answers that loop",
        "break-even acceptance (cost of a cycle in plain steps)",
    )
    lines = ["| `bash scripts/demo.sh` | trained in the demo | shipped |", "|---|---|---|"]
    rows = zip(names, column(trained), column(shipped), strict=True)
    lines += [f"| {' | '.join(row)} |" for row in rows]
    hardware = shipped["hardware"]
    lines += [
        "",
        f"SmolLM2-135M-Instruct, float32, {hardware['cores']} CPU cores ({hardware['machine']}), "
        f"{shipped['prompts']} held-out prompts, batch 1, greedy, jax "
        f"{shipped['versions']['jax']}, {shipped['date'][:10]}; from `docs/results/demo_cpu.json` "
        "and `docs/results/shipped_cpu.json`.",
    ]
    return "\n".join(lines)


def demo_figure(result: dict[str, Any], path: Path) -> None:
    """The shipped drafter: tokens a second, and cycles by acceptance length."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dflash-jax"  # the same bytes for the same numbers
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), width_ratios=(1, 1.4))
    rates = [result["plain_tokens_per_second"], result["tokens_per_second"]]
    bars = left.barh(["plain", "speculative"], rates, color=["#9aa5b1", "#1f6feb"])
    left.bar_label(bars, fmt="%.1f", padding=3)
    left.set_xlim(0, max(rates) * 1.2)
    left.invert_yaxis()
    left.set_title("tokens/s, the same answers")
    histogram = {int(n): count for n, count in result["histogram"].items()}
    lengths = range(1, max(histogram) + 1)
    right.bar(lengths, [histogram.get(n, 0) for n in lengths], color="#1f6feb")
    right.axvline(
        result["break_even_acceptance"], color="#d1242f", linestyle="--", label="break-even mean"
    )
    right.axvline(result["mean_acceptance_length"], color="black", label="mean")
    right.set_xticks(list(lengths))
    right.set_xlabel("tokens committed in a cycle")
    right.set_title("cycles by acceptance length")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def with_table(readme: str, name: str, table: str) -> str:
    """The README with the table in the place of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"README.md must hold {begin} and {end} once each")
    head, rest = readme.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def read_results(pattern: str) -> list[dict[str, Any]]:
    """The result files that match, by name."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob(pattern))]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    (trained,), (shipped,) = read_results("demo_cpu.json"), read_results("shipped_cpu.json")
    evaluations = read_results("evaluation_*.json")
    link = EVALUATION_FIGURE.relative_to(ROOT).as_posix()
    block = evaluation_block(evaluations, read_results("transformers_lookup_*.json"), link)
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = with_table(old, "results", demo_table(trained, shipped))
    new = with_table(new, "evaluation", block)
    if _CHECK.value:
        if new != old:
            sys.exit("README.md does not say what docs/results say: run scripts/plot_results.py")
        return
    demo_figure(shipped, FIGURE)
    if evaluations:
        evaluation_figure(evaluations, EVALUATION_FIGURE)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
