"""From settings to the parts of a run: mesh, target, drafter, rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.block_attention import resolve_implementation
from dflash_jax.config import DrafterConfig
from dflash_jax.drafter import DFlashDrafter, check_fits, init_drafter
from dflash_jax.drafter_init import check_copyable
from dflash_jax.errors import ConfigError
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.sharding import batch_sharding, make_mesh, param_shardings
from dflash_jax.target import Params, Target, resolve_attention
from train.chat import ChatFormat
from train.data import load_samples, make_loader, num_batches
from train.loss import LossConfig
from train.settings import Settings
from train.step import Objective
from train.store import StorePart, TokenStore, check_disjoint
from train.synthetic import TINY, tiny_target, write_rows

# dflash.md, section 3: block size -> gamma.
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
_LOGITS_BYTES = 2 * 1024**3  # float32 logits alive at once on a device


@dataclasses.dataclass(frozen=True)
class Models:
    """Target and drafter-to-be.

    Attributes:
      model: the drafter's module; computes in `drafter.dtype`.
      warm_params: parameters to go on from, or None for fresh ones.
      init: how fresh ones are made (`init_drafter`).
      features: False: the projection of the features starts as zeros and, its input being zero in
        training, stays so; decoding then needs no other code.
    """

    target: Target
    config: DrafterConfig
    model: DFlashDrafter
    warm_params: Params | None
    init: str
    features: bool = True

    def initial_params(self, seed: int) -> tuple[Callable[..., Params], tuple[Any, ...]]:
        """A traceable function and its arguments: the float32 parameters to start from."""

        def finish(params: Params) -> Params:
            if self.features:
                return params
            return {**params, "fc": jax.tree.map(jnp.zeros_like, params["fc"])}

        if self.warm_params is not None:
            return finish, (self.warm_params,)

        def make(target_params: Params) -> Params:
            target = dataclasses.replace(self.target, params=target_params)
            return finish(init_drafter(target, self.config, seed, init=self.init).params)

        return make, (self.target.params,)  # an argument: constants would be compiled in


def build_mesh(settings: Settings) -> Mesh:
    """The mesh that the config asks for, over the first devices."""
    with settings.blame("mesh"):
        return make_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)


def build_target(settings: Settings, mesh: Mesh) -> Target:
    """Loads the target, sharded over the mesh."""
    if settings.target.path != TINY:
        with settings.blame("target.path"):
            return load_target(settings.target.path, settings.target.dtype, mesh)
    dtype = settings.target.dtype
    if dtype == "auto":
        dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    target = tiny_target(settings.target.seed, jnp.dtype(dtype))
    placed = jax.device_put(target.params, param_shardings(target.params, mesh))
    return dataclasses.replace(target, params=placed)


def build_models(settings: Settings, mesh: Mesh) -> Models:
    """Target and drafter config; a warm start's parameters too.

    Raises:
      ConfigError: the config states another drafter than `warm_start` holds, with both values.
      ValueError: the drafter does not fit the target.
    """
    target, s = build_target(settings, mesh), settings.drafter
    dtype = target.model.dtype if s.dtype == "auto" else jnp.dtype(s.dtype)
    warm_params = None
    if s.warm_start:
        with settings.blame("drafter.warm_start"):
            warm = load_drafter(s.warm_start, target, "float32", mesh)
        config, warm_params = warm.config, warm.params
        _check_warm_start(settings, config)
    else:
        taps: dict[str, Any] = {"num_taps": s.num_taps}
        if s.target_layer_ids:
            taps = {"target_layer_ids": s.target_layer_ids}
        with settings.blame("drafter"):
            config = DrafterConfig.for_target(
                target.config,
                mask_token_id=s.mask_token_id,
                num_layers=s.num_layers,
                block_size=s.block_size,
                **taps,
            )
        check_fits(config, target, settings.source)
        if s.init == "target":
            check_copyable(config, target.config, settings.target.path)
    model = DFlashDrafter(config, dtype)
    return Models(target, config, model, warm_params, s.init, s.features)


def _check_warm_start(settings: Settings, config: DrafterConfig) -> None:
    s = settings.drafter
    stated = {
        "num_layers": (s.num_layers, config.num_hidden_layers),
        "block_size": (s.block_size, config.block_size),
        "mask_token_id": (s.mask_token_id, config.mask_token_id),
        "target_layer_ids": (s.target_layer_ids, config.target_layer_ids),
        "num_taps": (0 if s.target_layer_ids else s.num_taps, len(config.target_layer_ids)),
    }
    problems = [
        f"drafter.{name}: the config has {mine}, {s.warm_start} has {theirs}"
        for name, (mine, theirs) in stated.items()
        if mine not in (0, -1, ()) and mine != theirs
    ]
    if problems:
        raise ConfigError("\n".join(f"{settings.source}: {problem}" for problem in problems))


def build_objective(settings: Settings, models: Models) -> Objective:
    """The loss of the config.

    Raises:
      ConfigError: gamma is not stated and the block size has no published one, or an attention
        asked for by name cannot run here.
    """
    train, block = settings.train, models.config.block_size
    gamma = train.gamma or _GAMMA.get(block)
    if gamma is None and train.loss == "decay":
        raise ConfigError(
            f"{settings.source}: train.gamma: needed for block size {block} (published values are "
            f"for {sorted(_GAMMA)})"
        )
    devices = list(build_mesh(settings).devices.flat)
    with settings.blame("train.attention"):
        attention = resolve_implementation(train.attention, devices)
    with settings.blame("train.target_attention"):
        target_attention = resolve_attention(train.target_attention, models.target.model, devices)
    return Objective(
        target=models.target.model,
        drafter=models.model,
        loss=LossConfig(
            kind=train.loss,
            gamma=gamma or 1.0,
            alpha=train.alpha,
            labels=train.labels,
            soft_weight=train.soft_weight,
            chunk_bytes=_LOGITS_BYTES * settings.mesh.data * settings.mesh.fsdp,
        ),
        num_anchors=train.num_anchors,
        anchors=train.anchors,
        features=models.features,
        attention=attention,
        target_attention=target_attention,
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a run.

    Attributes:
      train, held_out: held_out is None where the config leaves nothing to evaluate on.
      reports: what became of the files' rows, as text.
    """

    train: TokenStore
    held_out: TokenStore | None
    reports: tuple[str, ...]

    def prompts(self, count: int) -> list[list[int]]:
        """The first held-out prompts: what comes before a row's first supervised token."""
        store = self.held_out
        if store is None:
            return []
        rows = [store.prompt(i).tolist() for i in range(min(count, len(store)))]
        return [row for row in rows if row]


def build_rows(settings: Settings, target: Target, mask_token_id: int, workdir: Path) -> Rows:
    """Reads the files, or has the target write them first.

    Raises:
      ValueError: see `train.data.load_samples` and `check_disjoint` (data.eval).
    """
    data = settings.data
    files: list[Any] = list(data.train)
    name = data.regenerated_by or settings.target.path
    if settings.synthetic.rows:
        path = workdir / "data" / f"process_{jax.process_index()}.jsonl"
        files = [write_rows(path, target, settings.synthetic, avoid=(mask_token_id,))]
        name = target.name
    chat = None
    if getattr(target.tokenizer, "chat_template", None):
        chat = ChatFormat(target.tokenizer, data.enable_thinking, target.stop_token_ids or None)

    def load(files: list[Any], side: str, fraction: float, limit: int) -> tuple[TokenStore, str]:
        field = "data.eval" if side == "eval" else "data.train"
        if fraction:
            field += f", {side} (data.held_out_fraction {fraction})"
        with settings.blame(field):
            store, report = load_samples(
                files,
                chat,
                max_length=data.max_length,
                vocab_size=target.config.vocab_size,
                target_name=name,
                held_out_fraction=fraction,
                held_out=side == "held out",
                on_truncation=data.on_truncation,
                # Evaluation reports what loops apart, and has no use for half of it.
                loops=data.loops if side == "train" else "keep",
                limit=limit or None,
            )
        return store, f"{side}: {report}"

    fraction = data.held_out_fraction
    train, train_report = load(files, "train", fraction, data.limit)
    if data.eval:
        held_out, report = load(list(data.eval), "eval", 0.0, settings.eval.num_rows)
        check_disjoint(train, held_out)
        return Rows(train, held_out, (train_report, report))
    if not fraction:
        return Rows(train, None, (train_report, "nothing is held out: no evaluation"))
    held_out, report = load(files, "held out", fraction, settings.eval.num_rows)
    return Rows(train, held_out, (train_report, report))


def total_steps(settings: Settings, rows: Rows) -> int:
    """Optimizer steps of the whole run."""
    if settings.train.steps:
        return settings.train.steps
    steps = num_batches(
        len(rows.train), batch_size=settings.data.batch_size, epochs=settings.train.epochs
    )
    if not steps:
        raise ConfigError(
            f"{settings.source}: data.batch_size {settings.data.batch_size} is above the "
            f"{len(rows.train)} rows x train.epochs {settings.train.epochs}"
        )
    return steps


def train_batches(settings: Settings, rows: Rows) -> grain.DatasetIterator:
    """This host's batches, without end or for all epochs; `get_state` / `set_state` resume it."""
    return iter(
        make_loader(
            rows.train,
            batch_size=settings.data.batch_size,
            seq_length=settings.data.max_length,
            seed=settings.train.seed,
            epochs=None if settings.train.steps else settings.train.epochs,
            host_index=jax.process_index(),
            host_count=jax.process_count(),
        )
    )


def eval_batches(
    settings: Settings, held_out: TokenStore, looping: bool
) -> Iterable[Mapping[str, np.ndarray]]:
    """The held-out rows that loop or do not, once, in order; the last batch is filled up with
    empty rows."""
    chosen = np.flatnonzero(held_out.looping == looping)
    if not len(chosen):
        return ()
    return make_loader(
        StorePart(held_out, chosen),
        batch_size=settings.data.batch_size // settings.train.accumulate,
        seq_length=settings.data.max_length,
        seed=0,
        epochs=1,
        shuffle=False,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
        drop_remainder=False,
    )


def place(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This host's rows as part of the global batch, split over `data` and `fsdp`."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }
