"""The kernel check: every case in its table, and one that fails does not stop the others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts import check_kernels

ROOT = Path(__file__).resolve().parent.parent


def test_a_case_that_raises_is_a_result() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no such instruction\nat line 3")

    console = Console(quiet=True)
    rows = [
        check_kernels.attempt("broken", broken, console),
        check_kernels.attempt("fine", lambda: {"ok": True, "forward ms": 1.5}, console),
    ]
    assert rows[0]["raised"] == ["RuntimeError: no such instruction", "at line 3"]
    assert [row["ok"] for row in rows] == [False, True]
    assert check_kernels.table(rows).row_count == 2


@pytest.mark.slow
def test_tiny(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/check_kernels.py", "--tiny", "--repeats=1"]
    done = subprocess.run([*command, f"--output={out}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["cases"]
    assert [row["name"] for row in rows if "parity" in row["name"]] == [
        "tiny, float32 parity",
        "tiny, bfloat16 parity",
    ]
    assert {"tiny, pallas", "tiny, chunked", "tiny, dense"} <= {row["name"] for row in rows}
    assert all(row.get("ok", True) for row in rows)
    assert sum("step ms" in row for row in rows) == 1
