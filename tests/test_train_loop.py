"""A whole small run in this process: numbers, files, export, and one device against eight."""

import dataclasses
import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from configs import tiny
from dflash_jax.drafter import Drafter, draft_logits
from dflash_jax.errors import ConfigError
from dflash_jax.generation import generate_ids
from dflash_jax.loading import load_drafter
from dflash_jax.target import target_forward
from scripts.export_drafter import export
from train import setup
from train.checkpoint import Checkpoints
from train.loop import Summary, train
from train.metrics import NonFiniteError, read_rows
from train.optimizer import make_optimizer, make_schedule
from train.packed import pack
from train.settings import Settings
from train.state import TrainState, create_state
from train.step import anchor_hash, make_eval_step, make_train_step

SMALL: dict[str, Any] = {
    "drafter.num_layers": 1,
    "data.max_length": 20,
    "data.batch_size": 16,
    "synthetic.rows": 128,
    "synthetic.response_length": 12,
    "train.steps": 30,
    "train.num_anchors": 8,
    "train.eval_every": 15,
    "train.checkpoint_every": 20,
    "optimizer.learning_rate": 1e-2,
    "eval.num_rows": 8,
    "eval.num_prompts": 4,
    "eval.max_new_tokens": 12,
    "eval.block_sizes": (2, 6),
}


def small(**changes: Any) -> Settings:
    """The tiny config, smaller; `section__field=value` changes more."""
    config = tiny.get_config()
    for name, value in {**SMALL, **changes}.items():
        section, field = name.replace("__", ".").split(".")
        config[section][field] = value
    return Settings.from_config(config, "configs/tiny.py")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return train(small(), tmp_path_factory.mktemp("run"), quiet())


@pytest.fixture(scope="module")
def models() -> setup.Models:
    settings = small()
    return setup.build_models(settings, setup.build_mesh(settings))


@pytest.fixture(scope="module")
def trained(run: Summary, models: setup.Models) -> Drafter:
    with Checkpoints(run.workdir, keep=None) as checkpoints:
        return dataclasses.replace(checkpoints.restore_drafter(), model=models.model)


def rows_of(run: Summary, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.workdir / "metrics.jsonl") if row["kind"] == kind]


def test_it_learns(run: Summary) -> None:
    rows = rows_of(run, "train")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[0]["loss"] == pytest.approx(math.log(64), rel=0.1)  # a fresh drafter knows nothing
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert np.mean([row["accuracy"] for row in rows[-5:]]) > 0.3  # chance is 1/64
    assert run.evaluation["loss"] < rows[0]["loss"]
    assert run.train == rows[-1]
    assert all(len(row["accuracy_by_slot"]) == 3 for row in rows)


def test_each_row_says_what_it_saw(run: Summary) -> None:
    rows = rows_of(run, "train")
    assert all(len(row["sample_ids"]) == 16 for row in rows)
    assert len({tuple(row["sample_ids"]) for row in rows}) == 30
    assert len({row["anchor_hash"] for row in rows}) == 30
    rates = [row["learning_rate"] for row in rows]
    schedule = make_schedule(small().optimizer, 30)
    np.testing.assert_allclose(rates, [float(schedule(i)) for i in range(30)], rtol=1e-6)


def test_evaluations_and_files(run: Summary) -> None:
    assert [row["step"] for row in rows_of(run, "eval")] == [15, 30]
    row = run.evaluation
    assert 1 <= row["acceptance"] <= 4
    assert 1 <= row["decode_acceptance"] <= 4
    assert row["decode_prompts"] == 4
    for size in (2, 6):  # one smaller and one larger than what it was trained with
        assert 1 <= row[f"decode_block_{size}"]["acceptance"] <= size
    assert sorted(p.name for p in (run.workdir / "checkpoints").iterdir()) == ["20", "30"]
    assert list((run.workdir / "tensorboard").glob("events*"))


def test_without_features_the_drafter_sees_none(tmp_path: Path, models: setup.Models) -> None:
    settings = small(drafter__features=False, train__steps=3, eval__block_sizes=())
    summary = train(settings, tmp_path, quiet())
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        drafter = dataclasses.replace(checkpoints.restore_drafter(), model=models.model)
    assert not jnp.any(drafter.params["fc"]["kernel"])  # so it decodes as it was trained
    assert summary.evaluation["decode_acceptance"] >= 1
    anchor = jnp.array([5]), jnp.array([3])
    logits = []
    for tokens in (range(1, 9), range(11, 19)):
        features = target_forward(models.target, [list(tokens)], models.config.target_layer_ids)[1]
        logits.append(draft_logits(models.target, drafter, features, *anchor))
    chex.assert_trees_all_equal(*logits)


def test_run_again_it_is_finished(run: Summary) -> None:
    console = quiet()
    before = (run.workdir / "metrics.jsonl").read_bytes()
    again = train(small(), run.workdir, console)
    assert "finished: step 30 of 30" in console.file.getvalue()  # type: ignore[attr-defined]
    assert (again.train, again.evaluation) == (run.train, run.evaluation)
    assert (run.workdir / "metrics.jsonl").read_bytes() == before
    console.print(run.table())
    assert "acceptance, decoded" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_to_evaluate_on_may_come_from_a_file(
    run: Summary, models: setup.Models, tmp_path: Path
) -> None:
    """The held-out side stays out of training all the same."""
    (path,) = (run.workdir / "data").glob("*.jsonl")
    pack([path], tmp_path / "eval.npz", None, 0.1, True)
    files = {"synthetic__rows": 0, "data__train": (str(path),)}
    files["data__regenerated_by"] = models.target.name
    one, other = (
        setup.build_rows(small(**files, **more), models.target, 1, tmp_path)
        for more in ({}, {"data__eval": (str(tmp_path / "eval.npz"),)})
    )
    assert one.train.checksum() == other.train.checksum()
    assert one.held_out is not None
    assert other.held_out is not None
    assert one.held_out.checksum() == other.held_out.checksum()


def test_decoding_accepts_what_teacher_forcing_predicts(
    run: Summary, models: setup.Models, trained: Drafter
) -> None:
    """Walks a row by the drafts of every anchor: the cycles of real decoding, one by one."""
    target = models.target
    rows = setup.build_rows(small(), target, 1, run.workdir)
    prompts = rows.prompts(3)
    out = generate_ids(target, trained, prompts, max_new_tokens=12)
    for prompt, new, lengths in zip(prompts, out.token_ids, out.acceptance_lengths, strict=True):
        tokens = np.array([*prompt, *new])
        _, features = target_forward(target, tokens[None], trained.config.target_layer_ids)
        anchors = np.arange(len(prompt), len(tokens) - 1)
        logits = draft_logits(
            target, trained, jnp.repeat(features, len(anchors), 0), tokens[anchors], anchors
        )
        drafts = dict(zip(anchors.tolist(), np.argmax(logits, -1)[:, 1:], strict=True))
        position, walked = len(prompt), []
        while position < len(tokens) - 1:
            truth = tokens[position + 1 : position + 4]
            right = drafts[position][: len(truth)] == truth
            count = min(int(np.cumprod(right).sum()) + 1, len(tokens) - 1 - position)
            walked.append(count)
            position += count
        assert walked == lengths


def test_export_and_reload(
    run: Summary, models: setup.Models, trained: Drafter, tmp_path: Path
) -> None:
    folder, step = export(run.workdir, tmp_path / "out", "float32")
    assert step == 30
    loaded = load_drafter(folder, models.target, "float32")
    assert loaded.config == trained.config
    chex.assert_trees_all_equal(loaded.params, trained.params)
    folder, _ = export(run.workdir, tmp_path / "half", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    half = load_drafter(folder, models.target, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}


def test_warm_start(run: Summary, models: setup.Models, trained: Drafter, tmp_path: Path) -> None:
    folder, _ = export(run.workdir, tmp_path / "out", "float32")
    unstated = {"num_layers": 0, "num_taps": 0, "target_layer_ids": (), "block_size": 0}
    changes = {f"drafter.{name}": value for name, value in unstated.items()}
    changes |= {"drafter.warm_start": str(folder), "drafter.mask_token_id": -1}
    settings = small(**changes)
    mesh = setup.build_mesh(settings)
    warm = setup.build_models(settings, mesh)
    assert warm.config == trained.config
    make_params, arguments = warm.initial_params(seed=1)
    optimizer = make_optimizer(settings.optimizer, 1)
    state = create_state(make_params, optimizer, 0, mesh, *arguments)[0]()
    chex.assert_trees_all_equal(state.params, trained.params)
    with pytest.raises(ConfigError, match=r"drafter\.block_size: the config has 8, .*out has 4"):
        setup.build_models(small(**changes, drafter__block_size=8), mesh)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    settings = small(optimizer__learning_rate=1e30, train__checkpoint_every=1, train__eval_every=0)
    with pytest.raises(NonFiniteError, match=r"step 2: loss nan.* sample ids \[.*step 1 in") as e:
        train(settings, tmp_path, quiet())
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1]
    assert str(tmp_path) in str(e.value)
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        assert checkpoints.latest_step == 1


def test_an_evaluation_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is there before it, and the next start makes up for it."""
    settings = small(train__steps=2, train__eval_every=0, eval__num_prompts=0)

    def fail(*_: Any) -> None:
        raise MemoryError("evaluation")

    with monkeypatch.context() as patch:
        patch.setattr("train.loop.teacher_forced", fail)
        with pytest.raises(MemoryError):
            train(settings, tmp_path, quiet())
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        assert checkpoints.latest_step == 2
    console = quiet()
    summary = train(settings, tmp_path, console)
    assert "evaluation of step 2 is missing" in console.file.getvalue()  # type: ignore[attr-defined]
    assert summary.evaluation["step"] == summary.started_at == 2
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["kind"]) for row in rows] == [
        (1, "train"),
        (2, "train"),
        (2, "eval"),
    ]
    again = train(settings, tmp_path, console)
    assert "finished: step 2 of 2" in console.file.getvalue()  # type: ignore[attr-defined]
    assert again.evaluation == summary.evaluation


def first_steps(count: int, models: setup.Models, **changes: Any) -> tuple[TrainState, list[float]]:
    """`count` steps without the loop: the state and the losses."""
    # Drawn weights: with copied ones the odd gradient is so small that Adam shows its rounding.
    settings = small(**{"drafter.init": "random", **changes})
    mesh = setup.build_mesh(settings)
    params = jax.device_put(models.target.params, setup.param_shardings(models.target.params, mesh))
    dtype = jnp.dtype("bfloat16" if settings.drafter.dtype == "bfloat16" else "float32")
    models = dataclasses.replace(
        models,
        target=dataclasses.replace(models.target, params=params),
        model=type(models.model)(models.config, dtype),
        init=settings.drafter.init,
    )
    optimizer = make_optimizer(settings.optimizer, 30)
    make, arguments = models.initial_params(0)
    make_state, abstract = create_state(make, optimizer, 0, mesh, *arguments)
    step = make_train_step(
        setup.build_objective(settings, models),
        optimizer,
        make_schedule(settings.optimizer, 30),
        settings.train.accumulate,
        mesh,
        abstract,
    )
    state, losses = make_state(), []
    rng = np.random.default_rng(0)
    for i in range(count):
        mask = rng.random((8, 20)) < 0.8
        batch = {
            "tokens_BT": rng.integers(2, 64, (8, 20), np.int32),
            "loss_mask_BT": mask,
            "length_B": np.full(8, 20, np.int32),
            "sample_id_B": np.arange(8, dtype=np.int32) + 8 * i,
        }
        state, metrics = step(state, params, setup.place(batch, mesh))
        losses.append(float(metrics.loss))
    return state, losses


@pytest.fixture(scope="module")
def one_device(models: setup.Models) -> tuple[TrainState, list[float]]:
    return first_steps(3, models)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
        {"mesh.fsdp": 2, "train.accumulate": 2, "train.attention": "chunked"},
    ],
    ids=["eight devices", "two devices, two parts, chunked attention"],
)
def test_the_loss_is_the_same_however_it_is_split(
    models: setup.Models,
    one_device: tuple[TrainState, list[float]],
    changes: dict[str, Any],
) -> None:
    """Only the order of float32 sums differs: 1e-6 in the loss, relatively, of order 4."""
    state, losses = first_steps(3, models, **changes)
    np.testing.assert_allclose(losses, one_device[1], rtol=2e-6)
    for a, b in zip(
        jax.tree.leaves(jax.device_get(state.params)),
        jax.tree.leaves(jax.device_get(one_device[0].params)),
        strict=True,
    ):
        # Adam's first steps divide a gradient by itself: near 0 its noise is amplified, to a
        # fraction of the learning rate of 1e-2.
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"train.labels": "target", "train.soft_weight": 0.5, "train.anchors": "uniform"},
        {"train.loss": "dpace", "train.soft_weight": 0.5, "drafter.init": "target"},
    ],
    ids=["target labels", "init from the target"],
)
def test_other_objectives_however_they_are_split(
    models: setup.Models, changes: dict[str, Any]
) -> None:
    """Tolerances as above."""
    one = first_steps(2, models, **changes)[1]
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    np.testing.assert_allclose(first_steps(2, models, **changes, **mesh)[1], one, rtol=2e-6)


def step_flops(models: setup.Models, **changes: Any) -> float:
    settings = small(**changes)
    mesh = setup.build_mesh(settings)
    objective = setup.build_objective(settings, models)
    make, arguments = models.initial_params(0)
    abstract = jax.eval_shape(make, *arguments)
    batch = {
        "tokens_BT": jax.ShapeDtypeStruct((8, 20), jnp.int32),
        "loss_mask_BT": jax.ShapeDtypeStruct((8, 20), jnp.bool_),
        "sample_id_B": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    step: Any = make_eval_step(objective, mesh)
    key = jax.random.key_data(jax.random.key(0))
    lowered = step.lower(abstract, models.target.params, batch, key)
    return lowered.compile().cost_analysis()["flops"]


def test_layers_beyond_the_last_tap_are_computed_only_if_asked_for(models: setup.Models) -> None:
    """Taps 0, 2, 3 of four layers against taps 0, 1, 2: one layer less, but for the logits."""
    c = models.config
    low = dataclasses.replace(c, target_layer_ids=(0, 1, 2))
    cut = dataclasses.replace(models, config=low, model=type(models.model)(low, jnp.float32))
    t = models.target.config
    projections = t.hidden_size * (2 * t.num_attention_heads + 2 * t.num_key_value_heads)
    layer = 2 * 8 * 20 * (projections * t.head_dim + 3 * t.hidden_size * t.intermediate_size)
    assert step_flops(models) - step_flops(cut) > layer
    own = {"train__labels": "target"}
    assert abs(step_flops(models, **own) - step_flops(cut, **own)) < layer / 100


def test_uniform_anchors_are_reached_by_a_setting(models: setup.Models) -> None:
    """Traced only: random anchors are the best of random scores, uniform ones need none."""
    mesh = setup.build_mesh(small())
    make, arguments = models.initial_params(0)
    params = jax.eval_shape(make, *arguments)
    batch = {
        "tokens_BT": jnp.zeros((2, 20), jnp.int32),
        "loss_mask_BT": jnp.ones((2, 20), bool),
        "sample_id_B": jnp.arange(2),
    }
    for anchors, drawn in (("random", True), ("uniform", False)):
        objective = setup.build_objective(small(train__anchors=anchors), models)
        traced = jax.make_jaxpr(partial(objective, mesh=mesh))
        inputs = (params, models.target.params, batch, jax.random.key(0))
        assert ("top_k" in str(traced(*inputs))) == drawn


def test_masters_stay_float32_in_bfloat16_training(
    models: setup.Models, one_device: tuple[TrainState, list[float]]
) -> None:
    state, losses = first_steps(3, models, drafter__dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))} == {
        jnp.dtype("float32")
    }
    assert losses != one_device[1]
    np.testing.assert_allclose(losses, one_device[1], rtol=0.02)  # bfloat16 has 8 bits


def test_anchor_hash_adds_up_over_rows_in_any_order() -> None:
    ids = jnp.array([3, 9, 4])
    anchors = jnp.array([[1, 5], [2, 5], [7, 0]])
    valid = jnp.array([[True, True], [True, True], [True, False]])
    whole = anchor_hash(ids, anchors, valid)
    order = jnp.array([2, 0, 1])
    assert anchor_hash(ids[order], anchors[order], valid[order]) == whole
    parts = [anchor_hash(ids[i], anchors[i], valid[i]) for i in (slice(0, 1), slice(1, 3))]
    assert parts[0] + parts[1] == whole
    assert anchor_hash(ids, anchors.at[0, 0].set(2), valid) != whole
    assert anchor_hash(ids, anchors.at[2, 1].set(9), valid) == whole  # it is not valid


def test_gamma_must_be_stated_where_none_is_published(models: setup.Models) -> None:
    with pytest.raises(ConfigError, match=r"configs/tiny.py: train.gamma: needed for block size 4"):
        setup.build_objective(small(train__gamma=0.0), models)
    assert setup.build_objective(small(train__gamma=0.0, train__loss="dpace"), models)
