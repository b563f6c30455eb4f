"""Key/value caches with per-row lengths.

A cache is reached only through these functions, so that another layout (pages, shared prefixes) can
take its place. Slot `s` of a row holds position `s`. Rolling back is setting a smaller length:
entries beyond it are stale, are never visible, and are overwritten by the next write.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Attributes:
    k, v: one array a layer, [B, K, S, H]. Separate arrays, so that each is updated in place in a
      loop.
    length_B: int32, the number of committed positions of each row, 0..S.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length_B: jax.Array

    @property
    def num_slots(self) -> int:
        return self.k[0].shape[2]


def init_cache(
    num_layers: int,
    batch: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
) -> KVCache:
    """An empty cache."""

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(
            jnp.zeros((batch, num_kv_heads, num_slots, head_dim), dtype) for _ in range(num_layers)
        )

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def write(slots_BKSH: jax.Array, new_BKTH: jax.Array, start_B: jax.Array) -> jax.Array:
    """Writes T entries of each row from slot `start` on.

    The caller keeps `start + T <= S`: XLA clamps the start of a slice, so a write past the end
    would silently land on earlier slots. Capacity is checked on the host when a cache is sized.
    """
    new_BKTH = new_BKTH.astype(slots_BKSH.dtype)
    if slots_BKSH.shape[0] == 1:
        return jax.lax.dynamic_update_slice(slots_BKSH, new_BKTH, (0, 0, start_B[0], 0))
    return jax.vmap(
        lambda slots, new, start: jax.lax.dynamic_update_slice(slots, new, (0, start, 0))
    )(slots_BKSH, new_BKTH, start_B)


def write_layers(
    cache: KVCache, k: tuple[jax.Array, ...], v: tuple[jax.Array, ...], start_B: jax.Array
) -> KVCache:
    """Writes the new [B, K, T, H] entries of every layer; lengths stay as they are."""
    return dataclasses.replace(
        cache,
        k=tuple(write(old, new, start_B) for old, new in zip(cache.k, k, strict=True)),
        v=tuple(write(old, new, start_B) for old, new in zip(cache.v, v, strict=True)),
    )


def commit(cache: KVCache, length_B: jax.Array) -> KVCache:
    """Sets the number of valid positions: forward after a write, back after a rejection."""
    return dataclasses.replace(cache, length_B=length_B.astype(jnp.int32))


def insert_rows(batch: Tree, rows_R: jax.Array, group: Tree) -> Tree:
    """Puts the R rows of `group` in place of `rows` of `batch`: trees of arrays with rows first.

    Row numbers beyond the batch are dropped, so that a group of static size can be partly empty.
    """
    return jax.tree.map(lambda many, new: many.at[rows_R].set(new, mode="drop"), batch, group)
