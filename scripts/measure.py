"""Runs a command, then prints its wall time and peak memory; exits with the command's status.

    python scripts/measure.py COMMAND [ARGUMENT ...]

Memory is the proportional set size (a page shared by n processes counts 1/n in each) summed over
the command and all its descendants, sampled twice a second: short peaks may be missed. Linux only.
"""

import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.5


def _parents() -> dict[int, int]:
    """Process id -> parent's id, of every process of the machine."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # ended meanwhile
            continue
        # The name, field 2, is in parentheses and may hold spaces and parentheses itself.
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return parents


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def tree_bytes(pid: int) -> int:
    """Proportional set size of a process and all its descendants, in bytes."""
    parents = _parents()
    tree, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in tree} - tree
        tree |= more
        grown = bool(more)
    return sum(_pss_bytes(member) for member in tree)


def main(command: list[str]) -> int:
    if not command or command[0].startswith("-"):
        print(__doc__, file=sys.stdout if command == ["--help"] else sys.stderr)
        return 0 if command == ["--help"] else 2
    start, peak = time.monotonic(), 0
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.exit(f"error: {error}")
    while True:
        try:
            code = process.wait(timeout=PERIOD_S)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, tree_bytes(process.pid))
        except KeyboardInterrupt:  # the command got it too; let it close down
            continue
    minutes = (time.monotonic() - start) / 60
    print(
        f"{minutes:.1f} min, peak memory {peak / 2**30:.2f} GiB "
        "(proportional set size of all processes, sampled every 0.5 s)",
        flush=True,
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
