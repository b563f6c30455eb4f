"""Exports the newest checkpoint of a run in the published layout: config.json, model.safetensors.

    python scripts/export_drafter.py --workdir=DIR --out=DIR [--dtype=bfloat16] \\
        [--max_shard_size=15MB]

The target is not needed: the checkpoint holds the drafter's own config. The files are read by
`dflash_jax.load_drafter`, vLLM, SGLang and tpu-inference.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
from absl import logging

from dflash_jax.loading import export_drafter
from train.checkpoint import Checkpoints


def export(
    workdir: str | Path,
    out: str | Path,
    dtype: str = "bfloat16",
    max_shard_size: str | None = None,
) -> tuple[Path, int]:
    """Writes the newest checkpoint of `workdir` to `out`; returns the folder and the step.

    `max_shard_size`: as in `dflash_jax.export_drafter`.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
    """
    with Checkpoints(workdir, keep=None) as checkpoints:
        step, drafter = checkpoints.latest_step, checkpoints.restore_drafter()
    assert step is not None  # restored from it
    params = jax.tree.map(lambda p: p.astype(dtype), drafter.params)
    exported = dataclasses.replace(drafter, params=params)
    return export_drafter(exported, out, max_shard_size=max_shard_size), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="the run's workdir")
    parser.add_argument("--out", required=True, help="folder to write, made where it is missing")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--max_shard_size", help="split larger weights into files with an index, e.g. 15MB"
    )
    options = parser.parse_args()
    logging.set_verbosity(logging.WARNING)
    try:
        out, step = export(options.workdir, options.out, options.dtype, options.max_shard_size)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"step {step} of {options.workdir} -> {out} ({options.dtype})")


if __name__ == "__main__":
    main()
