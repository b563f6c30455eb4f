"""One process at a time writes a file or folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class BusyError(OSError):
    """Another process is writing there."""


@contextlib.contextmanager
def only_writer(lock: str | Path, what: str | Path) -> Iterator[None]:
    """Holds the file `lock` while the body runs; the system lets go of it when a process dies.

    Args:
      what: is written to, for the message.

    Raises:
      BusyError: another process holds it.
    """
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise BusyError(f"{what}: another process is writing there ({lock} is held)") from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        held.release()
