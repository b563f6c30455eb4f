"""Mesh axes and one table from parameter paths to partition specs, for targets and drafters.

Axes: `data` repeats the parameters and splits the batch; `fsdp` splits both; `tensor` splits
attention heads, MLP width and vocabulary. A 1x1x1 mesh is the single-device case of the same code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical axis -> mesh axis; axes that are not listed are never split.
MESH_AXIS = {"embed": "fsdp", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

# End of a parameter's path -> its logical axes. The same table serves optimizer states, whose
# paths end alike. Whole heads are split, never a head's own dimension.
LOGICAL_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed/embedding", ("vocab", "embed")),
    (r"lm_head/kernel", ("vocab", "embed")),
    (r"attention/qkv/kernel", ("kv_heads", None, None, "embed")),
    (r"attention/qkv/bias", ("kv_heads", None, None)),
    (r"attention/q/kernel", ("kv_heads", None, None, "embed")),
    (r"attention/q/bias", ("kv_heads", None, None)),
    (r"attention/out/kernel", ("embed", "kv_heads", None, None)),
    (r"attention/out/bias", (None,)),
    (r"mlp/gate_up/kernel", (None, "mlp", "embed")),
    (r"mlp/gate_up/bias", (None, "mlp")),
    (r"mlp/down/kernel", ("embed", "mlp")),
    (r"mlp/down/bias", (None,)),
    (r"moe/router/kernel", (None, "embed")),
    (r"moe/gate_up", (None, None, "mlp", "embed")),
    (r"moe/down", (None, "embed", "mlp")),
    (r"fc/kernel", ("embed", None)),
    (r"kv/kernel", (None, "kv_heads", None, None, "embed")),
    (r"kv/bias", (None, "kv_heads", None, None)),
    (r"attention/k_norm/scale", (None,)),
    (r"k_norm/scale", (None, None)),  # the drafter's, of all layers
    (r"\w*norm/scale", (None,)),
)
_TABLE = tuple((re.compile(rf"(?:^|/){pattern}$"), axes) for pattern, axes in LOGICAL_AXES)


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices, the first ones of all by default.

    Raises:
      ConfigError: fewer devices than asked for, or a size below 1.
    """
    shape = (data, fsdp, tensor)
    for name, size in zip(MESH_AXES, shape, strict=True):
        if size < 1:
            raise ConfigError(f"mesh.{name}: {size} is below 1")
    devices = list(jax.devices() if devices is None else devices)
    count = int(np.prod(shape))
    if count > len(devices):
        raise ConfigError(
            f"mesh: data {data} x fsdp {fsdp} x tensor {tensor} = {count} devices, "
            f"but {len(devices)} are available"
        )
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices[:count]
    )


def path_name(path: Sequence[Any]) -> str:
    """A key path of `jax.tree_util` as `layers_0/attention/q/kernel`."""
    parts = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)
    return "/".join(str(part) for part in parts)


def logical_axes(name: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter at path `name`; scalars have none.

    Raises:
      KeyError: the table has no such parameter, or one with another number of axes.
    """
    if ndim == 0:
        return ()
    for pattern, axes in _TABLE:
        if pattern.search(name):
            if len(axes) != ndim:
                raise KeyError(f"{name}: {ndim} axes, but the sharding table has {axes}")
            return axes
    raise KeyError(f"{name}: no entry of the sharding table fits")


def partition_spec(
    name: str, shape: Sequence[int], mesh: Mesh, *, strict: bool = False
) -> PartitionSpec:
    """Spec of one parameter. An axis that the mesh does not divide evenly stays whole.

    Raises:
      ConfigError: with `strict`, where an axis does not divide, with both numbers.
    """
    spec: list[str | None] = []
    for size, axis in zip(shape, logical_axes(name, len(shape)), strict=True):
        mesh_axis = MESH_AXIS.get(axis) if axis else None
        ways = mesh.shape[mesh_axis] if mesh_axis else 1
        if size % ways:
            if strict:
                raise ConfigError(
                    f"{name}: {axis} has {size} entries, which mesh axis {mesh_axis} = {ways} "
                    "does not divide"
                )
            ways = 1
        spec.append(mesh_axis if ways > 1 else None)
    while spec and spec[-1] is None:  # P("a", None) and P("a") mean the same but compare unequal
        spec.pop()
    return PartitionSpec(*spec)


def param_shardings(params_or_abstract: Any, mesh: Mesh, *, strict: bool = False) -> Any:
    """A tree of `NamedSharding` like the given tree of parameters, optimizer state or both.

    Args:
      params_or_abstract: arrays or `jax.ShapeDtypeStruct`; paths end as in the table.
      strict: refuse a mesh that does not divide an axis, instead of leaving that axis whole
        (grouped-query models have few key/value heads, so it is common and harmless).

    Raises:
      KeyError: a leaf that the table does not know.
      ConfigError: see `strict`.
    """

    def one(path: Sequence[Any], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, mesh, strict=strict))

    return jax.tree_util.tree_map_with_path(one, params_or_abstract)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `data` and `fsdp`, the other axes whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())
