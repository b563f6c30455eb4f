"""Figure and table of the README, from the recorded results.

    python scripts/plot_results.py          writes docs/figures and README.md
    python scripts/plot_results.py --check  exits with 1 if README.md is not what the results say

README.md holds the table between `<!-- results -->` and `<!-- /results -->`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "figures" / "demo.svg"
BEGIN, END = "<!-- results -->", "<!-- /results -->"

_CHECK = flags.DEFINE_bool("check", False, "Only compare README.md with the results.")


def demo_table(result: dict[str, Any]) -> str:
    """The demo's numbers as Markdown."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    same = result["identical"]
    hardware = result["hardware"]
    rows = [
        ("plain decoding", f"{result['plain_tokens_per_second']:.1f} tokens/s"),
        ("speculative decoding", f"{result['tokens_per_second']:.1f} tokens/s"),
        ("speedup", f"{result['speedup']:.2f}x"),
        ("identical answers", f"{sum(same)} of {len(same)}"),
        ("mean acceptance length", number(result["mean_acceptance_length"])),
        (
            f"of the {result['prompts'] - result['looping']} answers that do not loop",
            number(result["mean_acceptance_length_other"]),
        ),
        ("cost of a cycle in plain steps", number(result["cycle_cost_in_plain_steps"])),
    ]
    lines = ["| `bash scripts/demo.sh` | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += [
        "",
        f"SmolLM2-135M-Instruct, float32, {hardware['cores']} CPU cores "
        f"({hardware['machine']}), jax {result['versions']['jax']}, {result['date'][:10]}; "
        "from `docs/results/demo_cpu.json`.",
    ]
    return "\n".join(lines)


def demo_figure(result: dict[str, Any], path: Path) -> None:
    """Tokens a second, and cycles by acceptance length."""
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


def with_table(readme: str, table: str) -> str:
    """The README with the table in its place."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    result = json.loads((RESULTS / "demo_cpu.json").read_text(encoding="utf-8"))
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = with_table(old, demo_table(result))
    if _CHECK.value:
        if new != old:
            sys.exit("README.md does not say what docs/results say: run scripts/plot_results.py")
        return
    demo_figure(result, FIGURE)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
