"""Trains a drafter. Run again with the same workdir, it resumes.

python -m train.main --config=configs/NAME.py --workdir=DIR [--config.section.field=value]

On several hosts, the same command on each of them: with `--distributed` on a TPU pod or under SLURM
or Open MPI, elsewhere with `--coordinator`, `--num_processes` and `--process_id`. The workdir is
shared.
"""

import re
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from train.loop import train
from train.metrics import NonFiniteError
from train.settings import Settings

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's config.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Checkpoints, metrics and data of the run.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One process of several, found by JAX.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, if not found.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process_id", None, "With --coordinator.", lower_bound=0)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:  # Orbax tells its whole life at the level INFO
        logging.set_verbosity(logging.WARNING)
    console, workdir = Console(), _WORKDIR.value
    assert workdir is not None  # marked as required
    source = config_flags.get_config_filename(flags.FLAGS["config"])
    try:
        join_processes()
        summary = train(Settings.from_config(_CONFIG.value, source), workdir, console)
    except (ValueError, OSError, NonFiniteError) as error:
        sys.exit(f"error: {error}")
    if jax.process_index() == 0:
        console.print(summary.table())


def join_processes() -> None:
    """Connects to the run's other processes, where the flags say that there are any.

    Raises:
      ValueError: flags that do not go together.
    """
    count, index = _PROCESSES.value, _PROCESS.value
    stated = {"num_processes": count, "process_id": index}
    if _COORDINATOR.value is None:
        for name, value in stated.items():
            if value is not None:
                raise ValueError(f"{name}: {value} needs --coordinator=host:port")
        if _DISTRIBUTED.value:
            jax.distributed.initialize()
        return
    for name, value in stated.items():
        if value is None:
            raise ValueError(f"{name}: missing, --coordinator={_COORDINATOR.value} needs it")
    assert count is not None  # for the type checker
    assert index is not None
    if index >= count:
        raise ValueError(f"process_id: {index} is not below num_processes {count}")
    jax.distributed.initialize(_COORDINATOR.value, count, index)


def _parse(argv: list[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError) as error:
        sys.exit(f"error: {_unknown_field(argv, str(error.args[0] if error.args else error))}")
    except TypeError as error:  # a value of another type
        sys.exit(f"error: {error}")


def _unknown_field(argv: list[str], text: str) -> str:
    """The override that ml_collections could not place: it says the last part of the name only."""
    name = re.search(r"[\w-]+", text)
    last = name[0] if name else text
    overrides = [arg.split("=")[0] for arg in argv if arg.lstrip("-").startswith("config.")]
    named = next((arg for arg in overrides if last in arg.split(".")), "--config")
    close = re.search(r'Did you mean "(\w+)"', text)
    return f"{named}: unknown field {last!r}" + (f"; did you mean {close[1]!r}?" if close else "")


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
