"""Draft-block attention through the fastest kernel there is; which one can run where."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.kernels.block_attention.layout import Spec, Tiles
from dflash_jax.kernels.block_attention.pallas_triton import flash_attention

DTYPES = ("float32", "bfloat16", "float16")
MIN_CAPABILITY = 8.0  # bfloat16 tensor cores


def why_not(device: jax.Device) -> str | None:
    """Why the kernels do not run on this device, or None where they do."""
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, and the device is {device.platform}"
    if "cuda" not in device.client.platform_version.lower():
        return f"needs CUDA, and the platform is {device.client.platform_version!r}"
    if float(device.compute_capability) < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY}, {device} has {device.compute_capability}"
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

    Args:
      tiles: by default those for the dtype.
      interpret: run the kernels in plain JAX, for tests.

    Raises:
      ValueError: the dtypes differ or have no kernel, with their names.
    """
    arrays = (q_BAGKRH, context_k_BKSH, context_v_BKSH, block_k_BAGKH, block_v_BAGKH)
    names = [x.dtype.name for x in arrays]
    if len(set(names)) > 1 or names[0] not in DTYPES:
        raise ValueError(f"dtypes of q, context k, v, block k, v: {names} are not one of {DTYPES}")
    batch, anchors, block, kv_heads, groups, head_dim = q_BAGKRH.shape
    if 0 in q_BAGKRH.shape or not context_k_BKSH.shape[2]:
        raise ValueError(f"q {q_BAGKRH.shape} or context {context_k_BKSH.shape} is empty")
    spec = Spec(groups, window, causal, tiles or Tiles.for_dtype(q_BAGKRH.dtype), interpret)
    q_BKAPH = jnp.einsum("bagkrh->bkagrh", q_BAGKRH)
    out: Any = flash_attention(
        spec,
        q_BKAPH.reshape(batch, kv_heads, anchors, block * groups, head_dim),
        context_k_BKSH,
        context_v_BKSH,
        jnp.einsum("bagkh->bkagh", block_k_BAGKH),
        jnp.einsum("bagkh->bkagh", block_v_BAGKH),
        anchor_positions_BA.astype(jnp.int32),
    )
    return jnp.einsum("bkagrh->bagkrh", out.reshape(q_BKAPH.shape))
