"""Trains variants of one run on the same budget and puts their results beside each other.

    python scripts/ablate.py --config=configs/smollm2_135m.py --plan=configs/ablations.json \\
        --workdir=runs/ablations --output=docs/results/ablations.json [--jobs=3] [--only=REGEX] \\
        [--set=train.steps=1000 --set=...]

The plan is a JSON object: a name for each variant, and the fields it changes. `--set` changes every
variant, before its own fields. Each variant is a `train.main` of its own in WORKDIR/NAME, `--jobs`
of them at a time on the same devices: one compiles while another trains. Run again, finished
variants are not trained again and stopped ones go on; a folder that was trained with other settings
is refused. Results of other variants in the output file stay. A variant that fails is reported; the
others go on.
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.table import Table

from train.metrics import read_rows

_CONFIG = flags.DEFINE_string("config", None, "The run's config file.", required=True)
_PLAN = flags.DEFINE_string("plan", None, "JSON: name -> {field: value}.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Gets a folder a variant.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "JSON of all results.", required=True)
_JOBS = flags.DEFINE_integer("jobs", 1, "Variants trained at the same time.", lower_bound=1)
_ONLY = flags.DEFINE_string("only", "", "Only variants whose name matches.")
_SET = flags.DEFINE_multi_string("set", [], "section.field=value for all variants.")

SETTINGS = "variant.json"  # in a variant's folder: the command it was trained with
# Columns of the table: key of an evaluation row, and its heading.
COLUMNS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "acceptance": "acceptance, simulated",
    "decode_acceptance": "tau",
    "decode_acceptance_other": "tau, not looping",
}


class PlanError(ValueError):
    """The plan cannot be used; says where."""


def environment() -> dict[str, Any]:
    """As in other result files; asked in another process: devices are the variants'."""
    code = "import json; from infer.bench_report import environment as e; print(json.dumps(e()))"
    alone = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = subprocess.run(
        [sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise PlanError(f"no JAX here: {asked.stderr.strip()[-300:]}")
    return json.loads(asked.stdout.splitlines()[-1])


def read_plan(path: Path, only: str) -> dict[str, dict[str, Any]]:
    """The variants whose name matches `only`.

    Raises:
      PlanError: no object of objects, a name that is no folder name, or nothing left.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path}: not JSON: {error}") from error
    if not isinstance(plan, dict) or not all(isinstance(v, dict) for v in plan.values()):
        raise PlanError(f"{path}: expected an object of variants, each an object of fields")
    for name in plan:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise PlanError(f"{path}: {name!r}: a name has letters, digits, '.', '_' and '-' only")
    try:
        chosen = {name: fields for name, fields in plan.items() if re.search(only, name)}
    except re.error as error:
        raise PlanError(f"only: {only!r} is no regular expression: {error}") from error
    if not chosen:
        raise PlanError(f"{path}: none of {sorted(plan)} matches {only!r}")
    return chosen


def command(name: str, fields: dict[str, Any]) -> list[str]:
    """The `train.main` command of a variant."""
    changes = [f"--config.{change}" for change in _SET.value]
    changes += [f"--config.{field}={_text(value)}" for field, value in fields.items()]
    workdir = Path(_WORKDIR.value) / name
    return ["-m", "train.main", f"--config={_CONFIG.value}", f"--workdir={workdir}", *changes]


def _text(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else str(value)


def check_folders(plan: dict[str, dict[str, Any]]) -> None:
    """A folder goes on with the settings that it was trained with.

    Raises:
      PlanError: it has other ones, with both.
    """
    for name, fields in plan.items():
        workdir = Path(_WORKDIR.value) / name
        path, now = workdir / SETTINGS, ["python", *command(name, fields)]
        if not path.exists() or not any((workdir / "checkpoints").glob("[0-9]*")):
            continue
        before = json.loads(path.read_text(encoding="utf-8"))["command"]
        if before != now:
            gone, new = (
                " ".join(a.removeprefix("--config.") for a in one if a not in other) or "none"
                for one, other in ((before, now), (now, before))
            )
            raise PlanError(f"{workdir}: trained with {gone}, now {new}; use another workdir")


def read_results(path: Path) -> dict[str, Any]:
    """The variants that an earlier run has written.

    Raises:
      PlanError: the file is something else.
    """
    if not path.exists():
        return {}
    try:
        variants = json.loads(path.read_text(encoding="utf-8"))["variants"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path}: not a file of this command ({error!r})") from None
    if not isinstance(variants, dict):
        raise PlanError(f"{path}: not a file of this command (variants {variants!r:.40})")
    return variants


def train_variant(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Runs it to its end; its record, with the last lines of its log if it failed."""
    workdir = Path(_WORKDIR.value) / name
    workdir.mkdir(parents=True, exist_ok=True)
    share = {}
    if _JOBS.value > 1:  # each process would take most of the device's memory
        share["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / _JOBS.value:.3f}"
    arguments = command(name, fields)
    record: dict[str, Any] = {"fields": fields, "command": ["python", *arguments]}
    stated = json.dumps({"command": record["command"]}) + "\n"
    (workdir / SETTINGS).write_text(stated, encoding="utf-8")
    with (workdir / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**share, **os.environ},
            check=False,
        )
    if done.returncode:
        lines = (workdir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        return {**record, "failed": lines[-5:]}
    rows = read_rows(workdir / "metrics.jsonl")
    curve = [row for row in rows if row["kind"] == "eval"]
    return {**record, "evaluations": curve, "steps": rows[-1]["step"]}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The last evaluation of every variant."""
    rows = Table("variant", *COLUMNS.values(), title="last evaluation, same held-out rows")
    for name, result in results.items():
        if "failed" in result:
            rows.add_row(name, "failed: " + " ".join(result["failed"])[-160:])
        elif not result["evaluations"]:
            rows.add_row(name, "nothing held out")
        else:
            last = result["evaluations"][-1]
            rows.add_row(name, *("-" if last.get(k) is None else f"{last[k]:.3f}" for k in COLUMNS))
    return rows


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    console = Console()
    try:
        plan = read_plan(Path(_PLAN.value), _ONLY.value)
        if not Path(_CONFIG.value).is_file():
            raise PlanError(f"config: no file {_CONFIG.value!r}")
        for change in _SET.value:
            if not re.fullmatch(r"\w+\.\w+=.*", change):
                raise PlanError(f"set: {change!r} is not section.field=value")
        output = Path(_OUTPUT.value)
        check_folders(plan)
        others = {n: r for n, r in read_results(output).items() if n not in plan}
        output.parent.mkdir(parents=True, exist_ok=True)
        machine = environment()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    results: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def finish(name: str, record: dict[str, Any]) -> None:
        """Adds a record and writes the file anew: what is done stays, whatever happens next."""
        with lock:
            results[name] = record
            ordered = {name: results[name] for name in plan if name in results}
            whole = {
                "command": ["python", "scripts/ablate.py", *sys.argv[1:]],
                **machine,
                "variants": {**others, **ordered},
            }
            output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            state = "failed" if "failed" in record else "done"
            console.print(f"{len(results)}/{len(plan)} {name}: {state}", highlight=False)

    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        jobs = {pool.submit(train_variant, *item): item[0] for item in plan.items()}
        for job in concurrent.futures.as_completed(jobs):
            finish(jobs[job], job.result())
    console.print(table({name: results[name] for name in plan}))
    if any("failed" in result for result in results.values()):
        sys.exit("error: some variants failed; their folders have log.txt")


if __name__ == "__main__":
    app.run(main)
