"""Two real processes train one drafter: equal to one process, and resumed by one or by two."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from train.metrics import read_rows

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 12, 4
CHANGES = {
    "mesh.data": 2,
    "mesh.fsdp": 2,
    "train.steps": STEPS,
    "train.epochs": 0,
    "train.eval_every": 0,
    "train.checkpoint_every": EVERY,
    "train.keep": 9,
    "train.log_every": 1,
    "synthetic.rows": 64,
    "eval.num_prompts": 2,
}


def start(workdir: Path, devices: int, *flags: str, **changes: Any) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    overrides = {**CHANGES, **changes}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "train.main", "--config=configs/tiny.py"),
            *(f"--workdir={workdir}", *flags),
            *(f"--config.{name}={value}" for name, value in overrides.items()),
        ],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def start_pair(workdir: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = (f"--coordinator={address}", "--num_processes=2")
    return [start(workdir, 2, *common, f"--process_id={i}") for i in range(2)]


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def losses(workdir: Path) -> dict[int, tuple[float, int]]:
    rows = read_rows(workdir / "metrics.jsonl")
    found = {r["step"]: (r["loss"], r["anchor_hash"]) for r in rows if r["kind"] == "train"}
    assert list(found) == list(range(1, STEPS + 1))
    return found


def assert_same_run(workdir: Path, reference: Path) -> None:
    """Same anchors; losses differ by the order of float32 sums alone."""
    for step, (loss, anchors) in losses(reference).items():
        mine, mine_anchors = losses(workdir)[step]
        assert mine_anchors == anchors, step
        assert mine == pytest.approx(loss, rel=1e-5), step


@pytest.mark.slow
def test_killed_pair_resumes_on_two_and_on_one(tmp_path: Path) -> None:
    whole, pair, single = tmp_path / "whole", tmp_path / "pair", tmp_path / "single"
    finish(start(whole, 4))

    processes = start_pair(pair)
    saved = pair / "checkpoints" / str(EVERY)
    deadline = time.monotonic() + 500
    while not saved.is_dir():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)  # one dies; the scheduler then ends the other
    processes[0].send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    # One process has the data of the first; each of the two keeps what it wrote itself.
    shutil.copytree(pair, single)

    first, second = finish(*start_pair(pair))
    assert "resumed at step" in first
    assert "step " not in second  # one process speaks
    assert_same_run(pair, whole)

    (alone,) = finish(start(single, 4))
    assert "resumed at step" in alone
    assert_same_run(single, whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--process_id=1"], "process_id: 1 needs --coordinator"),
        (["--num_processes=2"], "num_processes: 2 needs --coordinator"),
        (["--coordinator=localhost:1"], "num_processes: missing"),
        (
            ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
            "process_id: 2 is not below num_processes 2",
        ),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: list[str], message: str) -> None:
    process = start(tmp_path / "run", 1, *flags)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert output.startswith(f"error: {message}"), output
