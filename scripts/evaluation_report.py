"""Tables and figure of recorded evaluations (scripts/evaluate_drafter.py, scripts/bench_lookup.py).

Only what was measured is shown: a set, temperature, batch size or device without results has no row
or column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NAMES = {"sharegpt": "ShareGPT", "humaneval": "HumanEval", "word_problems": "word problems"}
WAYS = {
    "eager": "Transformers, `generate`",
    "compiled": "Transformers, static cache (on a GPU: compiled)",
    "lookup": "Transformers, prompt lookup",
}
# Sets in one colour each; darker for the first, as in the tables.
_COLORS = {"sharegpt": "#1f6feb", "humaneval": "#d1242f", "word_problems": "#2da44e"}


def device_name(result: dict[str, Any]) -> str:
    """How a column calls the machine: the GPU's name, or the number of CPU cores."""
    hardware = result["hardware"]
    if hardware["backend"] == "cpu":
        return f"{hardware['cores']} CPU cores"
    return str(hardware["device"]).removeprefix("NVIDIA ")


def cells_of(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells of all files, each with the `machine` and what else decides whether it compares."""
    return [
        {
            **cell,
            "machine": device_name(result),
            "prompts_sha256": cell["settings"]["prompts_sha256"],
            "max_new_tokens": result["run"]["max_new_tokens"],
        }
        for result in results
        for cell in result["cells"].values()
    ]


def find(cells: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """The cells with these values."""
    return [c for c in cells if all(c[name] == value for name, value in values.items())]


def acceptance_cell(cells: Sequence[dict[str, Any]], **values: Any) -> dict[str, Any] | None:
    """Of the largest block; over the most prompts where it was measured more than once."""
    found = find(cells, **values)
    return max(found, key=lambda c: (c["block_size"], c["acceptance"]["prompts"]), default=None)


def fastest_cell(cells: Sequence[dict[str, Any]], **values: Any) -> dict[str, Any] | None:
    """The timed cell with the largest speedup: the block size that one would choose."""
    found = [c for c in find(cells, **values) if "comparison" in c]
    return max(found, key=lambda c: c["comparison"]["speedup"], default=None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _ordered(cells: Iterable[dict[str, Any]], field: str) -> list[Any]:
    """A field's values: sets in their own order, others sorted."""
    values = {cell[field] for cell in cells} - {None}
    if field == "set":
        return [name for name in NAMES if name in values]
    return sorted(values)


def _machines(cells: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(cell["machine"] for cell in cells if "comparison" in cell))


def main_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each set, temperature and batch size; tau once for each set and temperature."""
    argmax = find(cells, draft_policy="argmax")
    machines = _machines(argmax)
    rows = []
    for name in _ordered(argmax, "set"):
        for temperature in _ordered(find(argmax, set=name), "temperature"):
            where = {"set": name, "temperature": temperature}
            best = acceptance_cell(argmax, **where)
            assert best is not None
            accepted = best["acceptance"]
            tau = [
                _number(accepted["tau_other"]),
                f"{_number(accepted['tau'])} ({accepted['looping']} of {accepted['prompts']} loop)",
            ]
            batches = _ordered(find(argmax, **where), "batch_size") or [None]
            for i, batch in enumerate(batches):
                row = [NAMES[name], f"{temperature:g}", *(["", ""] if i else tau)]
                if machines:
                    row.append("" if batch is None else str(batch))
                for machine in machines:
                    cell = fastest_cell(argmax, **where, batch_size=batch, machine=machine)
                    row.append(
                        "-"
                        if cell is None
                        else f"{cell['comparison']['speedup']:.2f}x (block {cell['block_size']})"
                    )
                rows.append(row)
    head = ["held-out set", "T", "tau", "with answers that loop"]
    head += ["batch", *(f"speedup, {machine}" for machine in machines)] if machines else []
    return _table(head, rows)


def policy_table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """tau of argmax drafts beside coupled ones, where both were measured at the same block."""
    rows = []
    for name in _ordered(cells, "set"):
        for temperature in _ordered(find(cells, set=name), "temperature"):
            where = {"set": name, "temperature": temperature, "draft_policy": "coupled"}
            coupled = acceptance_cell(cells, **where)
            if coupled is None:
                continue
            where |= {"draft_policy": "argmax", "block_size": coupled["block_size"]}
            argmax = acceptance_cell(cells, **where)
            if argmax is not None:
                taus = [_number(c["acceptance"]["tau_other"]) for c in (argmax, coupled)]
                rows.append([NAMES[name], f"{temperature:g}", *taus])
    return (
        _table(["held-out set", "T", "tau, argmax drafts", "coupled drafts"], rows) if rows else []
    )


def transformers_table(
    cells: Sequence[dict[str, Any]], lookups: Iterable[dict[str, Any]]
) -> list[str]:
    """Tokens a second at batch 1, beside ours on the same device with the same prompts."""
    lines = []
    for lookup in lookups:
        machine, name, temperature = device_name(lookup), lookup["set"], lookup["temperature"]
        ways = lookup["ways"].items()
        rows = [[WAYS[way], f"{numbers['tokens_per_second']:.0f}"] for way, numbers in ways]
        same = ("set", "temperature", "batch_size", "max_new_tokens", "prompts_sha256")
        ours = fastest_cell(
            find(cells, draft_policy="argmax", machine=machine),
            **{field: lookup[field] for field in same},
        )
        if ours is not None:
            rates = [ours[way]["tokens_per_second"]["median"] for way in ("plain", "speculative")]
            rows += [
                ["dflash-jax, plain", f"{rates[0]:.0f}"],
                [f"dflash-jax, block {ours['block_size']}", f"{rates[1]:.0f}"],
            ]
        title = f"{machine}, {NAMES[name]}, T = {temperature:g}, batch 1"
        lines += ["", *_table([title, "tokens/s"], rows)]
    return lines[1:]


def evaluation_block(
    results: Sequence[dict[str, Any]], lookups: Sequence[dict[str, Any]], figure: str
) -> str:
    """What README.md says of the evaluations; empty without any."""
    cells = cells_of(results)
    if not cells:
        return ""
    first = results[0]
    sets = ", ".join(
        f"{NAMES[name]} {max(c['settings']['prompts'] for c in find(cells, set=name))}"
        for name in _ordered(cells, "set")
    )
    machines = [
        f"{device_name(result)} in {result['run']['dtype']} (jax {result['versions']['jax']}, "
        f"{result['date'][:10]})"
        for result in results
    ]
    parts = [
        [f"![acceptance by slot and speedup on held-out sets]({figure})"],
        main_table(cells),
        [
            f"{first['run']['target']} with {first['drafter']}; prompts it was never trained on: "
            f"{sets}; at most {first['run']['max_new_tokens']} new tokens. tau is tokens a cycle, "
            "answers that end in a loop left out and, beside it, included. Speedup over our own "
            f"jitted plain decoding, prefill included. {'; '.join(dict.fromkeys(machines))}."
        ],
        policy_table(cells),
        transformers_table(cells, lookups),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def evaluation_figure(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Acceptance by slot, and the speedups at batch 1 and T = 0 where timed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dflash-jax"  # the same bytes for the same numbers
    from matplotlib import pyplot as plt

    cells = find(cells_of(results), draft_policy="argmax")
    timed = find(cells, temperature=0.0, batch_size=1)
    machines, sets = _machines(timed), _ordered(cells, "set")
    figure, axes = plt.subplots(
        1, 2 if machines else 1, figsize=(10 if machines else 5, 3.2), squeeze=False
    )
    left = axes[0, 0]
    for name in sets:
        for temperature, style in ((0.0, "-"), (1.0, "--")):
            cell = acceptance_cell(cells, set=name, temperature=temperature)
            shares = cell and cell["acceptance"]["acceptance_by_slot_other"]
            if shares:
                slots = range(1, len(shares) + 1)
                label = f"{NAMES[name]}, T = {temperature:g}"
                left.plot(slots, shares, style, marker=".", color=_COLORS[name], label=label)
    left.set_ylim(0, 1)
    left.set_xlabel("slot")
    left.set_title("share of cycles that accept the slot")
    left.legend(frameon=False, fontsize="small")
    if machines:
        right, height = axes[0, 1], 0.8 / len(machines)
        for i, machine in enumerate(machines):
            found = [fastest_cell(timed, set=name, machine=machine) for name in sets]
            speedups = [0.0 if c is None else c["comparison"]["speedup"] for c in found]
            places = [j + i * height for j in range(len(sets))]
            color = ("#9aa5b1", "#1f6feb", "#24292f")[i % 3]
            bars = right.barh(places, speedups, height * 0.9, label=machine, color=color)
            right.bar_label(bars, [f"{s:.2f}x" if s else "" for s in speedups], padding=3)
        right.axvline(1, color="black", linewidth=0.8)
        right.set_yticks([j + 0.4 - height / 2 for j in range(len(sets))])
        right.set_yticklabels([NAMES[name] for name in sets])
        right.invert_yaxis()
        right.margins(x=0.15)
        right.set_title("speedup, greedy, batch 1")
        right.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
