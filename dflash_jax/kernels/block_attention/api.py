"""Draft-block attention through its kernels, and where these can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from dflash_jax.sharding import BATCH_AXES, MESH_AXIS

if TYPE_CHECKING:
    from dflash_jax.kernels.block_attention.layout import Tiles

DTYPES = ("float32", "bfloat16", "float16")
MIN_CAPABILITY = 8.0  # bfloat16 tensor cores


def why_not(device: jax.Device) -> str | None:
    """Why the kernels do not run on this device, or None where they do."""
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, and the device is {device.platform}"
    if "cuda" not in device.client.platform_version.lower():
        return f"needs CUDA, and the platform is {device.client.platform_version!r}"
    if float(device.compute_capability) < MIN_CAPABILITY:
        return (
            f"needs compute capability {MIN_CAPABILITY}, {device} has {device.compute_capability}"
        )
    return None


def block_attention(
    q_BAGKRH: jax.Array,
    context_k_BKSH: jax.Array,
    context_v_BKSH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    anchor_positions_BA: jax.Array,
    *,
    window: int | None,
    causal: bool,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`block_attention.context_block_attention` on scaled, grouped queries (R = N // K).

    float32 inputs are multiplied in float32; sums are float32 always. Anchors may stand in any
    order; ascending, as `train.anchors` returns them, they cost least.

    XLA cannot split a kernel. Under a mesh (`jax.set_mesh` or `jax.sharding.use_abstract_mesh`)
    each device therefore takes its rows and heads, as `dflash_jax.sharding` lays them out, where
    they divide evenly. Without one, arrays spread over devices are gathered first: right, but slow.

    Args:
      tiles: by default those for the dtype and sizes.
      interpret: run the kernels in plain JAX, for tests.

    Raises:
      ValueError: the dtypes differ or have no kernel, with their names.
    """
    # Pallas takes its time to import, and its Triton backend need not be there on every platform.
    from dflash_jax.kernels.block_attention.layout import Spec, Tiles
    from dflash_jax.kernels.block_attention.pallas_triton import flash_attention

    arrays = (q_BAGKRH, context_k_BKSH, context_v_BKSH, block_k_BAGKH, block_v_BAGKH)
    names = [x.dtype.name for x in arrays]
    if len(set(names)) > 1 or names[0] not in DTYPES:
        raise ValueError(f"dtypes of q, context k, v, block k, v: {names} are not one of {DTYPES}")
    batch, anchors, block, kv_heads, groups, head_dim = q_BAGKRH.shape
    if 0 in q_BAGKRH.shape or not context_k_BKSH.shape[2]:
        raise ValueError(f"q {q_BAGKRH.shape} or context {context_k_BKSH.shape} is empty")
    tiles = tiles or Tiles.default(q_BAGKRH.dtype, block * groups, head_dim)
    spec = Spec(groups, window, causal, tiles, interpret)
    q_BKAPH = jnp.einsum("bagkrh->bkagrh", q_BAGKRH)
    attend = _split(partial(flash_attention, spec), batch, kv_heads)
    out = attend(
        q_BKAPH.reshape(batch, kv_heads, anchors, block * groups, head_dim),
        context_k_BKSH,
        context_v_BKSH,
        jnp.einsum("bagkh->bkagh", block_k_BAGKH),
        jnp.einsum("bagkh->bkagh", block_v_BAGKH),
        anchor_positions_BA.astype(jnp.int32),
    )
    return jnp.einsum("bkagrh->bagkrh", out.reshape(q_BKAPH.shape))


def _split(attend: Callable[..., jax.Array], batch: int, kv_heads: int) -> Callable[..., jax.Array]:
    """`attend` on each device's rows and key/value heads, under the mesh of the context."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if _is_free(kind)]
    rows = _dividing(mesh, tuple(axis for axis in BATCH_AXES if axis in free), batch)
    heads = _dividing(mesh, tuple(a for a in (MESH_AXIS["kv_heads"],) if a in free), kv_heads)
    if not rows and not heads:
        return attend
    by_head = P(rows or None, heads or None)
    return jax.shard_map(
        attend,
        in_specs=(*[by_head] * 5, P(rows or None)),
        out_specs=by_head,
        check_vma=False,  # Pallas does not say over which axes its results vary
    )


def _is_free(kind: AxisType) -> bool:
    """Not yet split by a surrounding `shard_map`."""
    return kind != AxisType.Manual


def _dividing(mesh: AbstractMesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes, if they split at all and split `size` evenly."""
    ways = math.prod(mesh.shape[axis] for axis in axes)
    return axes if ways > 1 and size % ways == 0 else ()
