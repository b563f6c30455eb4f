"""Checkpoints: exact, committed whole, and refused where they belong to another run."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs import tiny
from dflash_jax.config import DrafterConfig
from dflash_jax.drafter import init_drafter
from dflash_jax.sharding import make_mesh
from train.checkpoint import Checkpoints, ResumeError, check_resume, describe
from train.optimizer import make_optimizer
from train.settings import Settings
from train.state import TrainState, create_state
from train.synthetic import tiny_target

SETTINGS = Settings.from_config(tiny.get_config())
TARGET = tiny_target(0, np.dtype("float32"))
DRAFTER = DrafterConfig.for_target(
    TARGET.config, mask_token_id=1, num_layers=1, target_layer_ids=(0, 2), block_size=4
)
META = describe(SETTINGS, TARGET, DRAFTER, "abc")


def make(mesh: jax.sharding.Mesh) -> tuple[Callable[[], TrainState], TrainState]:
    optimizer = make_optimizer(SETTINGS.optimizer, 10)
    return create_state(lambda: init_drafter(TARGET, DRAFTER).params, optimizer, 5, mesh)


@pytest.fixture(scope="module")
def state() -> TrainState:
    created = make(make_mesh(2, 2, 2))[0]()
    # A moment that is not zero, so that its restoration is seen.
    return jax.tree.map(lambda x: x + 1 if x.ndim else x, created)


@pytest.fixture(scope="module")
def saved(state: TrainState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    with Checkpoints(workdir, keep=2) as checkpoints:
        for step in (3, 6, 9):
            position = {"next": step}
            checkpoints.save(step, state, position, META)
            position["next"] = -1  # a live dict of the iterator, changed while the save goes on
    return workdir


def assert_equal(left: TrainState, right: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 1), (1, 8, 1)])
def test_restored_exactly_onto_any_mesh(
    saved: Path, state: TrainState, shape: tuple[int, ...]
) -> None:
    abstract = make(make_mesh(*shape))[1]
    with Checkpoints(saved, keep=2) as checkpoints:
        assert checkpoints.latest_step == 9
        restored, position = checkpoints.restore(abstract)
        assert checkpoints.restore_meta() == META
    assert_equal(restored, state)
    assert position == {"next": 9}
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
        assert a.sharding == b.sharding


def test_the_state_of_muon_round_trips(tmp_path: Path) -> None:
    optimizer = make_optimizer(dataclasses.replace(SETTINGS.optimizer, name="muon"), 10)
    make_state, abstract = create_state(
        lambda: init_drafter(TARGET, DRAFTER).params, optimizer, 5, make_mesh(2, 2, 2)
    )
    state = jax.tree.map(lambda x: x + 1 if x.ndim else x, make_state())
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state, {}, META)
        checkpoints.wait()
        restored, _ = checkpoints.restore(abstract)
    assert_equal(restored, state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
        assert a.sharding == b.sharding


def test_only_the_newest_are_kept(saved: Path) -> None:
    assert sorted(p.name for p in (saved / "checkpoints").iterdir()) == ["6", "9"]


def test_the_drafter_alone(saved: Path, state: TrainState) -> None:
    with Checkpoints(saved, keep=None) as checkpoints:
        drafter = checkpoints.restore_drafter(6)
    assert drafter.config == DRAFTER
    for a, b in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_a_killed_save_left_is_ignored_and_removed(tmp_path: Path, state: TrainState) -> None:
    half = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    (half / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    (half / "_CHECKPOINT_METADATA").write_text("{}")
    with Checkpoints(tmp_path, keep=None) as reader:  # beside a run: nothing is touched
        assert reader.latest_step is None
        assert half.exists()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
            checkpoints.restore_meta()
        checkpoints.save(7, state, {}, META)
        checkpoints.wait()
        assert checkpoints.latest_step == 7
    assert not half.exists()


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        Checkpoints(tmp_path / "none", keep=None)
    assert not (tmp_path / "none").exists()


def changed_meta(drafter: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    new = SETTINGS
    for name, value in settings.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(new, section), **{field: value})
        new = dataclasses.replace(new, **{section: part})
    return describe(new, TARGET, dataclasses.replace(DRAFTER, **(drafter or {})), "abc")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (changed_meta({"block_size": 5}), "drafter.block_size: the checkpoint has 4, this run 5"),
        (
            changed_meta({"target_layer_ids": (1, 2)}),
            r"drafter.target_layer_ids: the checkpoint has \(0, 2\), this run \(1, 2\)",
        ),
        (
            changed_meta({"rope": dataclasses.replace(DRAFTER.rope, theta=5.0)}),
            "drafter.rope.theta: the checkpoint has 10000.0, this run 5.0",
        ),
        (changed_meta(train__seed=1), "config train.seed: the checkpoint has 0, this run 1"),
        (changed_meta(data__batch_size=8), "config data.batch_size: the checkpoint has 16"),
        (META | {"data": {"checksum": "x"}}, "data.checksum: the checkpoint has 'abc', this run"),
        (
            META | {"target": META["target"] | {"rms_norm_eps": 1e-5}},
            "target.rms_norm_eps: the checkpoint has 1e-06, this run 1e-05",
        ),
    ],
)
def test_another_run_is_refused(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message) as caught:
        check_resume(META, meta, Path("run/checkpoints"))
    assert str(caught.value).startswith("run/checkpoints: ")


def test_other_changes_are_noted() -> None:
    assert check_resume(META, META, Path("x")) == []
    assert check_resume(META, changed_meta(train__steps=400, train__keep=3), Path("x")) == [
        "train.keep: 2 -> 3",
        "train.steps: 250 -> 400",
    ]


def test_a_damaged_checkpoint_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "9").rglob("*"):
        if file.is_file() and "state" in file.parts:
            os.truncate(file, min(file.stat().st_size, 10))
    with Checkpoints(tmp_path / "run", keep=None) as checkpoints:
        message = r"checkpoints/9: the checkpoint cannot be read .* other steps: \[6\]"
        with pytest.raises(ResumeError, match=message):
            checkpoints.restore_drafter()
        checkpoints.restore_drafter(step=6)
