"""Sizes of the draft-block attention kernels: tiles, padding, and which program reads what."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

MIN_TILE = 16  # the smallest side of a matrix product in Triton


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
      context: context positions a step of the forward and the first backward kernel.
      context_grad: context positions a program of the second backward kernel.
      num_warps, num_warps_grad: warps a program, of the same kernels.
      num_stages: depth of Triton's software pipeline.
    """

    context: int = 64
    context_grad: int = 64
    num_warps: int = 4
    num_warps_grad: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("context", "context_grad"):
            size = getattr(self, name)
            if size < MIN_TILE or size & (size - 1):
                raise ValueError(f"{name}: {size} is not a power of two from {MIN_TILE} on")

    @classmethod
    def default(cls, dtype: Any, num_rows: int, head_dim: int) -> Tiles:
        """What fits the registers of a Hopper GPU; float32 runs without tensor cores, for parity.

        Of 64 query rows at head dimension 128, four warps of the second backward kernel spill.
        """
        if jnp.dtype(dtype) == jnp.float32:
            return cls(context=32, context_grad=32, num_warps=8, num_warps_grad=8, num_stages=1)
        few = num_rows <= 64
        return cls(num_warps=4 if few else 8, num_warps_grad=4 if few and head_dim <= 64 else 8)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static. `groups` is R; `interpret` runs the kernels in plain JAX, on any
    backend, for tests."""

    groups: int
    window: int | None
    causal: bool
    tiles: Tiles
    interpret: bool = False


def anchor_ranges(
    anchors_BA: jax.Array, num_slots: int, tile: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 index of the anchors that see anything of each context tile.

    int32 [B, tiles] each, both 0 where none does. Any order of the anchors is right; in ascending
    order the ranges hold next to nothing else.
    """
    start_C1 = jnp.arange(0, num_slots, tile, dtype=jnp.int32)[:, None]
    sees_BCA = anchors_BA[:, None] > start_C1
    if window is not None:  # slot 0 sees furthest back: to anchor - window + 1
        sees_BCA &= anchors_BA[:, None] - window + 1 < start_C1 + tile
    index_A = jnp.arange(1, anchors_BA.shape[1] + 1, dtype=jnp.int32)
    last = jnp.max(jnp.where(sees_BCA, index_A, 0), axis=-1)
    first = jnp.min(jnp.where(sees_BCA, index_A - 1, last[..., None]), axis=-1)
    return first, last


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes, true and padded, and the block specs made of them.

    The grids are (anchor or tile, head, row), the first one varying fastest, so that programs
    running together share the context of a head in the L2 cache.
    """

    batch: int
    kv_heads: int
    anchors: int
    rows_used: int
    slots: int
    block_size: int
    head_dim: int
    tile: int
    tile_grad: int

    @classmethod
    def of(cls, q: jax.Array, context_k: jax.Array, block_k: jax.Array, spec: Spec) -> Shape:
        batch, kv_heads, anchors, rows, head_dim = q.shape
        tiles = spec.tiles
        return cls(
            *(batch, kv_heads, anchors, rows, context_k.shape[2], block_k.shape[3], head_dim),
            tile=tiles.context,
            tile_grad=tiles.context_grad,
        )

    @property
    def num_rows(self) -> int:
        return max(MIN_TILE, pl.next_power_of_2(self.rows_used))

    @property
    def num_block(self) -> int:
        return max(MIN_TILE, pl.next_power_of_2(self.block_size))

    @property
    def width(self) -> int:
        return max(MIN_TILE, pl.next_power_of_2(self.head_dim))

    @property
    def blocks_grid(self) -> tuple[int, int, int]:
        return self.anchors, self.kv_heads, self.batch

    @property
    def anchor(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None), lambda a, k, b: (b, a))

    @property
    def rows(self) -> pl.BlockSpec:
        shape = (None, None, None, self.num_rows, self.width)
        return pl.BlockSpec(shape, lambda a, k, b: (b, k, a, 0, 0))

    @property
    def row_numbers(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, self.num_rows), lambda a, k, b: (b, k, a, 0))

    @property
    def block(self) -> pl.BlockSpec:
        shape = (None, None, None, self.num_block, self.width)
        return pl.BlockSpec(shape, lambda a, k, b: (b, k, a, 0, 0))

    @property
    def context(self) -> pl.BlockSpec:
        padded = pl.cdiv(self.slots, self.tile) * self.tile
        return pl.BlockSpec((None, None, padded, self.width), lambda a, k, b: (b, k, 0, 0))

    @property
    def context_tile(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.tile_grad, self.width), lambda t, k, b: (b, k, t, 0))

    @property
    def tile_number(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None), lambda t, k, b: (b, t))

    @property
    def all_anchors(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.anchors), lambda t, k, b: (b, 0))

    @property
    def all_rows(self) -> pl.BlockSpec:
        shape = (None, None, self.anchors, self.num_rows, self.width)
        return pl.BlockSpec(shape, lambda t, k, b: (b, k, 0, 0, 0))

    @property
    def all_row_numbers(self) -> pl.BlockSpec:
        shape = (None, None, self.anchors, self.num_rows)
        return pl.BlockSpec(shape, lambda t, k, b: (b, k, 0, 0))
