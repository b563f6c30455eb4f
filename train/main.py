"""Trains a drafter. Run again with the same workdir, it resumes.

python -m train.main --config=configs/NAME.py --workdir=DIR [--config.section.field=value]
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from train.loop import train
from train.metrics import NonFiniteError
from train.settings import Settings

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's config.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Checkpoints, metrics and data of the run.")
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
        summary = train(Settings.from_config(_CONFIG.value, source), workdir, console)
    except (ValueError, OSError, NonFiniteError) as error:
        sys.exit(f"error: {error}")
    console.print(summary.table())


def _parse(argv: list[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, TypeError, KeyError) as error:  # a misspelled or mistyped override
        sys.exit(f"error: {error.args[0] if error.args else error}")


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
