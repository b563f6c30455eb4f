"""Orbax checkpoints: state, position in the data and the run's description, committed as one.

A step's folder gets its final name only when all of it is written. What a killed process leaves
behind has another name; it is ignored, and removed at the next start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import DFlashDrafter, Drafter, init_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.target import Target, TargetModel
from train.settings import Settings
from train.state import TrainState

Meta = dict[str, Any]


class ResumeError(ConfigError):
    """The checkpoint belongs to another run than the config describes."""


class Checkpoints:
    """The checkpoints of a workdir; a context manager that waits for the last write.

    Saving is asynchronous: the state is copied to the host first, so its buffers may be donated.

    Args:
      workdir: holds the folder `checkpoints`.
      keep: newest checkpoints kept; None reads only, beside a run that may still be going on.

    Raises:
      FileNotFoundError: to be read only, and there is no such folder.
    """

    def __init__(self, workdir: str | Path, keep: int | None):
        self.path = Path(workdir).absolute() / "checkpoints"
        if keep is None and not self.path.is_dir():
            raise FileNotFoundError(f"no folder {self.path}")
        self.path.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=keep is not None
        )
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: Mapping[str, Any], meta: Meta) -> None:
        """Starts writing. `data` is the iterator's `get_state()` after `step` batches."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(_plain(data)),
            meta=ocp.args.JsonSave(_plain(meta)),
        )
        self._manager.save(step, args=items)

    def wait(self) -> None:
        """Returns when everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def restore_meta(self, step: int | None = None) -> Meta:
        """The run's description alone.

        Raises:
          FileNotFoundError: there is no complete checkpoint.
        """
        return self._restore(step, meta=ocp.args.JsonRestore())["meta"]

    def restore(
        self, abstract: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """State, laid out as `abstract` says, and the iterator's state.

        Raises:
          FileNotFoundError: there is no complete checkpoint.
        """
        items = self._restore(
            step, state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
        )
        return items["state"], items["data"]

    def restore_drafter(self, step: int | None = None) -> Drafter:
        """The drafter alone, in float32; neither its target nor the run's config is needed.

        Raises:
          FileNotFoundError: there is no complete checkpoint.
        """
        meta = self.restore_meta(step)
        target_config = TargetConfig.from_hf(meta["target"], f"{self.path}: target")
        config = DrafterConfig.from_hf(meta["drafter"], f"{self.path}: drafter")
        target = Target(target_config, TargetModel(target_config, jnp.dtype("float32")), {})
        device = SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=device),
            jax.eval_shape(lambda: init_drafter(target, config).params),
        )
        wanted = {"params": abstract}
        arguments = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        params = self._restore(step, state=arguments)["state"]["params"]
        return Drafter(config, DFlashDrafter(config, jnp.dtype("float32")), params)

    def _restore(self, step: int | None, **items: Any) -> Any:
        step = self.latest_step if step is None else step
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self.path}")
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises whatever its parts do, with pages of text
            reason = next(iter(str(error).splitlines()), "")[:200]
            raise ResumeError(
                f"{self.path / str(step)}: the checkpoint cannot be read "
                f"({type(error).__name__}: {reason}); other steps: "
                f"{sorted(set(self._manager.all_steps()) - {step})}. Move this folder away to go "
                "on from the one before"
            ) from error


def _plain(value: Any) -> Any:
    """A copy that holds nothing but JSON values, so that a later change does not reach the file."""
    return json.loads(json.dumps(value))


def describe(settings: Settings, target: Target, drafter: DrafterConfig, checksum: str) -> Meta:
    """What is saved beside the state. `checksum` is of the training rows."""
    return {
        "config": settings.to_dict(),
        "target": {"name": target.name, **target.config.to_hf()},
        "drafter": drafter.to_hf(),
        "data": {"checksum": checksum},
        "versions": {
            name: version(name) for name in ("jax", "flax", "optax", "grain", "orbax-checkpoint")
        },
        "devices": {"backend": jax.default_backend(), "count": jax.device_count()},
    }


# Fields of the config without which the saved position in the data, the optimizer's state, or the
# loss curve is another.
_FIXED = ("data.batch_size", "data.max_length", "optimizer.name", "train.seed")
# Fields that a finished run has no use for: none of its numbers would be others.
_UNUSED = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "target.path", "data.train"),
    *("train.checkpoint_every", "train.keep", "train.log_every"),
)


def check_resume(saved: Meta, now: Meta, path: Path) -> list[str]:
    """Refuses a config that describes another model or other data than the checkpoint.

    Returns:
      Other differences, one line each (`train.steps: 100 -> 200`): the run goes on with the new
      values, and is then no exact continuation.

    Raises:
      ResumeError: every such field with both values.
    """
    problems = []
    for old, new in zip(_identity(saved, str(path)), _identity(_plain(now), "now"), strict=True):
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                problems.append(_difference(name, old.get(name), new.get(name)))
    old, new = _flat(saved["config"]), _flat(_plain(now["config"]))
    notes = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            if name in _FIXED:
                problems.append(_difference(f"config {name}", old.get(name), new.get(name)))
            else:
                notes.append(f"{name}: {old.get(name)} -> {new.get(name)}")
    if problems:
        listed = "\n  ".join(problems)
        raise ResumeError(
            f"{path}: the checkpoint is of another run (use another workdir):\n  {listed}"
        )
    return notes


def check_finished(notes: list[str], path: Path) -> None:
    """Refuses a finished run under settings that it was not trained with.

    Args:
      notes: of `check_resume`.

    Raises:
      ResumeError: every such field with both values.
    """
    changed = [note for note in notes if note.split(":")[0] not in _UNUSED]
    if changed:
        listed = "\n  ".join(changed)
        raise ResumeError(
            f"{path}: this run is finished, with other settings (use another workdir):\n  {listed}"
        )


def _identity(meta: Meta, source: str) -> list[dict[str, Any]]:
    """What a run cannot change, with flat names: drafter, target, data."""
    drafter = DrafterConfig.from_hf(meta["drafter"], f"{source}: drafter")
    target = TargetConfig.from_hf(meta["target"], f"{source}: target")
    parts = {
        "drafter": dataclasses.asdict(drafter),
        "target": dataclasses.asdict(target),
        "data": meta["data"],
    }
    for part in parts.values():
        for name, value in part.pop("rope", {}).items():
            part[f"rope.{name}"] = value
    return [{f"{k}.{name}": value for name, value in part.items()} for k, part in parts.items()]


def _difference(name: str, old: Any, new: Any) -> str:
    return f"{name}: the checkpoint has {old!r}, this run {new!r}"


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{s}.{name}": value for s, fields in sections.items() for name, value in fields.items()
    }
