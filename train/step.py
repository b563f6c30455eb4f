"""One training step under jit: target forward, anchors, loss, gradient, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dflash_jax.drafter import DFlashDrafter
from dflash_jax.sharding import batch_sharding
from dflash_jax.target import TargetModel
from train.anchors import sample_anchors, uniform_anchors
from train.loss import LossConfig, LossSums, drafter_loss, mean_loss
from train.state import Params, TrainState, state_shardings

Batch = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Numbers of one step, on the device until somebody asks.

    Attributes:
      sums: of the whole batch; what rates and means are made of.
      loss: float32.
      grad_norm: float32, before clipping.
      learning_rate: float32, of this step.
      anchor_hash: uint32 checksum of all anchors, so that runs can be compared.
    """

    sums: LossSums
    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    anchor_hash: jax.Array


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: the modules and everything static about the loss.

    Attributes:
      num_anchors: A, blocks a row.
      attention: implementation of the drafter's attention.
      target_attention: of the target's.
      anchors: where blocks start: "random" or "uniform" (train/anchors.py).
      features: False: the drafter sees zeros in place of the target's features.
    """

    target: TargetModel
    drafter: DFlashDrafter
    loss: LossConfig
    num_anchors: int
    attention: str
    target_attention: str
    anchors: str = "random"
    features: bool = True

    def __call__(
        self, params: Params, target_params: Params, batch: Batch, key: jax.Array, mesh: Mesh
    ) -> tuple[LossSums, jax.Array]:
        """Sums over the rows of `batch`, and the checksum of the anchors.

        Args:
          key: of random anchors; a row's depend on it and on the row's sample id.
        """
        tokens_BT = batch["tokens_BT"]
        frozen = jax.lax.stop_gradient({"params": target_params})
        c = self.drafter.config
        # Layers beyond the last tap are dead code unless the loss reads the target's logits.
        hidden_BTD, features_BTM, _ = self.target.apply(
            frozen, tokens_BT, layer_ids=c.target_layer_ids, attention=self.target_attention
        )
        if not self.features:
            features_BTM = jnp.zeros_like(features_BTM)
        features_BTM = jax.lax.with_sharding_constraint(features_BTM, batch_sharding(mesh))
        draw: Any = sample_anchors
        if self.anchors == "uniform":
            draw = partial(uniform_anchors, block_size=c.block_size)
        anchors_BA, valid_BA = draw(
            key, batch["sample_id_B"], batch["loss_mask_BT"], self.num_anchors
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # kernels split their work by it
            sums = drafter_loss(
                self.target,
                target_params,
                self.drafter,
                params,
                batch,
                features_BTM,
                anchors_BA,
                valid_BA,
                self.loss,
                self.attention,
                hidden_BTD if self.loss.needs_target_logits else None,
            )
        return sums, anchor_hash(batch["sample_id_B"], anchors_BA, valid_BA)


def anchor_hash(sample_ids_B: jax.Array, anchors_BA: jax.Array, valid_BA: jax.Array) -> jax.Array:
    """A uint32 checksum; the order of the rows does not matter, and sums over parts add up."""
    rows_B1 = sample_ids_B[:, None].astype(jnp.uint32) * jnp.uint32(2654435761)
    mixed = (rows_B1 ^ anchors_BA.astype(jnp.uint32)) * jnp.uint32(2246822519)
    return jnp.sum(jnp.where(valid_BA, mixed ^ (mixed >> 15), 0), dtype=jnp.uint32)


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulate: int,
    mesh: Mesh,
    abstract: TrainState,
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted step `(state, target_params, batch) -> (state, metrics)`; the state is donated.

    Numerators and denominators are summed over devices and the `accumulate` parts of the batch,
    and divided once: neither changes the loss but for the order of float32 sums.
    """

    def numerator(
        params: Params, target_params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
        sums, checksum = objective(params, target_params, batch, key, mesh)
        return sums.numerator, (sums, checksum)

    gradient = jax.grad(numerator, has_aux=True)

    def step(
        state: TrainState, target_params: Params, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        if accumulate == 1:
            grads, (sums, checksum) = gradient(state.params, target_params, batch, key)
        else:
            parts = jax.tree.map(lambda x: split_rows(x, accumulate), batch)
            zeros = jax.eval_shape(
                gradient, state.params, target_params, jax.tree.map(lambda x: x[0], parts), key
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)

            def add(total: Any, part: Batch) -> tuple[Any, None]:
                part = jax.lax.with_sharding_constraint(part, batch_sharding(mesh))
                new = gradient(state.params, target_params, part, key)
                return jax.tree.map(jnp.add, total, new), None

            (grads, (sums, checksum)), _ = jax.lax.scan(add, zeros, parts)
        loss = mean_loss(sums)
        # The denominator has no gradient: the mean's gradient is the numerator's, divided alike.
        scale = mean_loss(dataclasses.replace(sums, numerator=jnp.float32(1)))
        grads = jax.tree.map(lambda g: g * jnp.where(sums.denominator > 0, scale, 0.0), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = StepMetrics(
            sums=sums,
            loss=loss,
            grad_norm=optax.tree.norm(grads),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
            anchor_hash=checksum,
        )
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        return state, metrics

    out = (state_shardings(abstract, mesh), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def make_eval_step(
    objective: Objective, mesh: Mesh
) -> Callable[[Params, Params, Batch, jax.Array], LossSums]:
    """The jitted `(params, target_params, batch, anchor key data) -> sums`."""

    def step(params: Params, target_params: Params, batch: Batch, key: jax.Array) -> LossSums:
        return objective(params, target_params, batch, jax.random.wrap_key_data(key), mesh)[0]

    return jax.jit(step)


def split_rows(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...]: part i has rows i, i + parts, ..., so that every device
    keeps its own rows."""
    return rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1)
