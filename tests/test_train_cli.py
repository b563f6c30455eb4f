"""The command: exact resume after kill -9 (in a save and between two), and its error messages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs import tiny
from tests.test_train_loop import SMALL, quiet, small
from train.checkpoint import Checkpoints
from train.loop import train
from train.metrics import read_rows
from train.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
STEPS = 20
CHANGES: dict[str, Any] = {
    "train.steps": STEPS,
    "train.eval_every": 0,
    "train.checkpoint_every": 5,
    "train.log_every": 5,
    "data.held_out_fraction": 0.0,
}
# Dies where the checkpoint of step 10 is complete but for its final name.
KILLED_IN_A_SAVE = """
import os, runpy, signal, sys
rename = os.rename
def killed(source, target, **options):
    if str(target).endswith("checkpoints/10"):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **options)
os.rename = killed
sys.argv[0] = "train/main.py"
runpy.run_module("train.main", run_name="__main__", alter_sys=True)
"""


def start(workdir: Path, *program: str, **changes: Any) -> subprocess.Popen[str]:
    values = {**SMALL, **CHANGES, **changes}
    overrides = [f"--config.{name}={value}" for name, value in values.items()]
    command = [sys.executable, *program, "--config=configs/tiny.py", f"--workdir={workdir}"]
    return subprocess.Popen(
        command + overrides,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_twenty_steps_are_ten_killed_and_the_rest(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = train(small(**CHANGES), whole, quiet())
    assert summary.evaluation == {}  # nothing is held out
    assert summary.table().row_count == 6
    expected = read_rows(whole / "metrics.jsonl")
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1))

    first = start(parts, "-c", KILLED_IN_A_SAVE)
    output, _ = first.communicate(timeout=500)
    assert first.returncode == -signal.SIGKILL, output
    assert (parts / "checkpoints" / "10.orbax-checkpoint-tmp").is_dir()

    second = start(parts, "-m", "train.main")
    log = parts / "metrics.jsonl"
    deadline = time.monotonic() + 500
    while log.read_text().count("\n") < 13 or not (parts / "checkpoints" / "10").is_dir():
        assert second.poll() is None, second.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second.kill()
    output, _ = second.communicate()
    assert second.returncode == -signal.SIGKILL, output
    assert "resumed at step 5 of 20" in output

    third = start(parts, "-m", "train.main")
    output, _ = third.communicate(timeout=500)
    assert third.returncode == 0, output
    assert "resumed at step 1" in output  # 10 or 15: the kill came when it came
    assert "step 20" in output

    assert read_rows(log) == expected  # loss, rate, norm, sample ids, anchors: bit for bit
    assert_same_state(whole, parts)


@pytest.mark.slow
def test_the_tiny_config_learns_what_its_target_would_say(tmp_path: Path) -> None:
    settings = Settings.from_config(tiny.get_config())
    summary = train(settings, tmp_path, quiet())
    assert summary.evaluation["accuracy"] > 0.4  # held out; chance is 1/64
    assert min(summary.evaluation["accuracy_by_slot"]) > 0.3
    assert summary.evaluation["decode_acceptance"] > 1.4


def assert_same_state(left: Path, right: Path) -> None:
    states = []
    for workdir in (left, right):
        with Checkpoints(workdir, keep=None) as checkpoints:
            assert checkpoints.latest_step == STEPS
            states.append(checkpoints.restore_drafter().params)
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"drafter.blok_size": 5}, 'Did you mean "block_size" instead of "blok_size"'),
        ({"optimizer.b1": 2}, "error: configs/tiny.py: optimizer.b1: 2.0 is not allowed (below 1)"),
    ],
)
def test_errors_end_the_command(tmp_path: Path, override: dict[str, Any], message: str) -> None:
    process = start(tmp_path / "run", "-m", "train.main", **override)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
