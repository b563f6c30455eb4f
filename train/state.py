"""What a training step changes: one frozen dataclass, created where it will live."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from dflash_jax.sharding import partition_spec, path_name, replicated

Params = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State between steps.

    Attributes:
      step: int32, steps done.
      params: the drafter's, float32.
      opt_state: of the optax chain.
      key: uint32, `jax.random.key_data` of the run's anchor key; constant (steps are folded in).
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Shardings of a state (or its abstract form); optimizer moments lie where parameters do."""

    def one(path: Any, leaf: Any) -> Any:
        # The key, and coefficients that Muon's state repeats, are no parameters.
        if path_name(path).rsplit("/", 1)[-1] in ("key", "ns_coeffs"):
            return replicated(mesh)
        return NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, state)


def create_state(
    make_params: Callable[..., Params],
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    *arguments: Any,
) -> tuple[Callable[[], TrainState], TrainState]:
    """A function that builds the first state, sharded from the start, and its abstract form.

    Args:
      make_params: traceable; from `arguments` to the drafter's initial parameters.
      seed: of the anchors.
    """

    def make(*arguments: Any) -> TrainState:
        params = jax.tree.map(lambda p: p.astype(jnp.float32), make_params(*arguments))
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            key=jax.random.key_data(jax.random.key(seed)),
        )

    abstract = jax.eval_shape(make, *arguments)
    shardings = state_shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
    return partial(jax.jit(make, out_shardings=shardings), *arguments), abstract
