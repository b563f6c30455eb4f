"""Kills a training run at random moments until it is done, and compares it with one left alone.

    python scripts/stress_kill.py --config=configs/tiny.py --workdir=runs/stress --kills=20 \\
        --config.train.checkpoint_every=20 --output=docs/results/kill_test_cpu.json

Runs `train.main` once undisturbed and once with SIGKILL: the first kills fall anywhere in set-up,
the others wait for a random step within one and a half intervals of the checkpoint they go on from
and then up to half a second more, so that they also hit saves and evaluations. Checked after every
kill: the newest complete checkpoint is at most one interval behind the last step of the log.
Checked at the end: every row of both logs, training and evaluation, and every number of both last
checkpoints are equal bit for bit. Exit code 1 if not.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import ge, le
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from infer.bench_report import environment
from train.metrics import LOG
from train.settings import Settings, TrainSettings

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's config file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "New folder for both runs.", required=True)
_KILLS = flags.DEFINE_integer("kills", 20, "How many.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file.")
ROOT = Path(__file__).resolve().parent.parent
_TIME_LIMIT = 1800  # seconds without a new step, after which a run counts as stuck


class KillTestError(RuntimeError):
    """A run that failed by itself, or came out different."""


def overrides(argv: list[str]) -> list[str]:
    """The flags of this command that are the run's."""
    return [a for a in argv if a.startswith(("--config=", "--config.", "-config"))]


def start(workdir: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """A process of `train.main`; its output goes to WORKDIR.log."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with workdir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "train.main", *arguments, f"--workdir={workdir}"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def last_step(log: Path) -> int:
    """Step of the last whole training row of a log, 0 without one."""
    for line in reversed(log.read_bytes().split(b"\n")[:-1] if log.exists() else []):
        row = json.loads(line)
        if row["kind"] == "train":
            return int(row["step"])
    return 0


def newest_checkpoint(workdir: Path) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    folder = workdir / "checkpoints"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
    return max(steps, default=0)


def wait_for(
    process: subprocess.Popen[bytes], workdir: Path, reached: Callable[[int], bool]
) -> None:
    """Waits until the log's last step is as wanted, or the process has ended.

    Raises:
      KillTestError: the run failed, or made no step within the time limit.
    """
    seen, since = -1, time.monotonic()
    while not reached(now := last_step(workdir / LOG)):
        if process.poll() is not None:
            if process.returncode:
                raise KillTestError(
                    f"the run ended with {process.returncode}; see {workdir.with_suffix('.log')}"
                )
            return
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > _TIME_LIMIT:
            process.kill()
            raise KillTestError(f"{workdir}: no step after {seen} within {_TIME_LIMIT} s")
        time.sleep(0.002)


def kill_repeatedly(
    workdir: Path,
    arguments: list[str],
    train: TrainSettings,
    kills: int,
    seed: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Starts and kills a run `kills` times, then lets it end. What each kill hit, in order."""
    rng, steps, interval = random.Random(seed), train.steps, train.checkpoint_every
    found: list[dict[str, Any]] = []
    for number in range(kills):
        process = start(workdir, arguments)
        began = time.monotonic()
        if number < max(1, kills // 5):
            time.sleep(rng.uniform(0, 15))
        else:
            saved = newest_checkpoint(workdir)
            goal = rng.randint(saved + 1, max(saved + 1, min(saved + interval * 3 // 2, steps)))
            wait_for(process, workdir, partial(ge, saved))  # until the log is cut to it
            wait_for(process, workdir, partial(le, goal))
            time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.wait()
        logged, saved = last_step(workdir / LOG), newest_checkpoint(workdir)
        unfinished = [p.name for p in (workdir / "checkpoints").glob("*tmp*")]
        found.append(
            {
                "after_seconds": round(time.monotonic() - began, 2),
                "logged_step": logged,
                "checkpoint": saved,
                "lost_steps": max(0, logged - saved),
                "in_a_save": bool(unfinished),
                "ended_before": process.returncode == 0,
            }
        )
        console.print(f"kill {number + 1} of {kills}: {found[-1]}")
    process = start(workdir, arguments)
    if process.wait():
        raise KillTestError(f"the last run failed; see {workdir.with_suffix('.log')}")
    return found


def differences(one: Path, other: Path) -> list[str]:
    """What is not equal bit for bit in the logs and the last checkpoints of two runs."""
    logs = [(folder / LOG).read_text().splitlines() for folder in (one, other)]
    found = [
        f"log, row {i}: {a[:200]} against {b[:200]}"
        for i, (a, b) in enumerate(zip(*logs, strict=False))
        if a != b
    ]
    if len(logs[0]) != len(logs[1]):
        found.append(f"log: {len(logs[0])} rows against {len(logs[1])}")
    states = []
    for folder in (one, other):
        step = newest_checkpoint(folder)
        path = folder / "checkpoints" / str(step) / "state"
        states.append((step, ocp.StandardCheckpointer().restore(path)))
    if states[0][0] != states[1][0]:
        return [*found, f"last checkpoint: step {states[0][0]} against {states[1][0]}"]
    trees = [dict(_leaves(state)) for _, state in states]
    for name in trees[0].keys() | trees[1].keys():
        a, b = (np.asarray(tree.get(name)) for tree in trees)
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            found.append(f"state {name}: differs")
    return found


def _leaves(tree: Any, prefix: str = "") -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list, tuple)):
            yield from _leaves(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}", value


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    console, workdir = Console(highlight=False, soft_wrap=True), Path(_WORKDIR.value)
    try:
        settings = Settings.from_config(_CONFIG.value, "config")
        interval = settings.train.checkpoint_every
        if not settings.train.steps or not interval:
            raise KillTestError(
                f"train.steps {settings.train.steps} and train.checkpoint_every {interval}: both "
                "are needed here"
            )
        if workdir.exists():
            raise KillTestError(f"{workdir} exists; both runs need a new folder")
        workdir.mkdir(parents=True)
        arguments = overrides(sys.argv[1:])
        console.print("left alone ...")
        if start(workdir / "whole", arguments).wait():
            raise KillTestError(f"the run fails; see {workdir / 'whole.log'}")
        kills = kill_repeatedly(
            workdir / "killed", arguments, settings.train, _KILLS.value, _SEED.value, console
        )
        different = differences(workdir / "whole", workdir / "killed")
    except (KillTestError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    worst = max(kill["lost_steps"] for kill in kills)
    results = {
        "command": ["python", "scripts/stress_kill.py", *sys.argv[1:]],
        **environment(),
        "steps": settings.train.steps,
        "checkpoint_every": interval,
        "kills": kills,
        "most_lost_steps": worst,
        "different": different,
    }
    if _OUTPUT.value:
        Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
        Path(_OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")
    in_save = sum(kill["in_a_save"] for kill in kills)
    console.print(
        f"{len(kills)} kills, {in_save} of them in a save; at most {worst} steps lost of an "
        f"interval of {interval}; {'equal bit for bit' if not different else 'DIFFERENT'}"
    )
    for line in different[:20]:
        console.print(f"  {line}")
    if different or worst > interval:
        sys.exit(1)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
