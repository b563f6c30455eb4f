"""scripts/ablate.py: variants on one budget, one table; a failing one does not stop the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["train.steps=2", "train.epochs=0", "synthetic.rows=24", "eval.num_prompts=2"]


def ablate(tmp_path: Path, plan: object, *options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "plan.json"
    path.write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return subprocess.run(
        [
            sys.executable,
            "scripts/ablate.py",
            "--config=configs/tiny.py",
            f"--plan={path}",
            f"--workdir={tmp_path / 'runs'}",
            f"--output={tmp_path / 'out.json'}",
            *(f"--set={change}" for change in SMALL),
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_variants_beside_each_other(tmp_path: Path) -> None:
    plan = {
        "one-layer": {"drafter.num_layers": 1, "drafter.target_layer_ids": [0, 3]},
        "bad": {"drafter.num_layers": -3},
        "other": {"train.gamma": 1.0},
    }
    done = ablate(tmp_path, plan, "--jobs=2", "--only=one|bad")
    assert done.returncode == 1
    assert "some variants failed" in done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["variants"]) == ["one-layer", "bad"]
    assert {"versions", "hardware", "command"} <= set(result)
    bad, good = result["variants"]["bad"], result["variants"]["one-layer"]
    assert "drafter.num_layers: -3" in " ".join(bad["failed"])
    assert good["steps"] == 2
    assert good["evaluations"][-1]["decode_acceptance"] >= 1
    assert "--config.drafter.target_layer_ids=(0, 3)" in good["command"]
    before = (tmp_path / "runs/one-layer/metrics.jsonl").read_bytes()
    again = ablate(tmp_path, plan, "--only=one")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "runs/one-layer/metrics.jsonl").read_bytes() == before
    kept = json.loads((tmp_path / "out.json").read_text())["variants"]
    assert sorted(kept) == ["bad", "one-layer"], "results of other variants stay"
    # Old numbers must not come to stand under new settings.
    plan["one-layer"]["train.gamma"] = 1.0
    plan["bad"] = {"drafter.num_layers": 1}
    changed = ablate(tmp_path, plan)
    assert changed.returncode == 1
    assert "one-layer: trained with none, now train.gamma=1.0" in changed.stderr
    assert json.loads((tmp_path / "out.json").read_text())["variants"] == kept


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ("{", [], "plan.json: not JSON"),
        ([1], [], "expected an object of variants"),
        ({"a/b": {}}, [], "'a/b': a name has"),
        ({"a": {}}, ["--only=z"], "none of ['a'] matches 'z'"),
        ({"a": {}}, ["--only=("], "only: '(' is no regular expression"),
        ({"a": {}}, ["--set=steps"], "set: 'steps' is not section.field=value"),
        ({"a": {}}, ["--config=configs/none.py"], "config: no file 'configs/none.py'"),
    ],
)
def test_bad_plans_are_one_line(
    tmp_path: Path, plan: object, options: list[str], message: str
) -> None:
    done = ablate(tmp_path, plan, *options)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.json").exists()
