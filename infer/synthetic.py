"""Forced acceptance, to measure what a cycle costs without a trained drafter.

The drafter runs whole and its drafts are verified as usual, so the work of a cycle is the real one;
only the number of accepted drafts is drawn from a schedule instead of found by comparison. The
output is therefore NOT the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.decode import BoundTarget, Pick, Proposer
from dflash_jax.drafter import Drafter
from dflash_jax.generation import CustomDrafter, as_proposer
from dflash_jax.target import Params


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """A proposer whose drafts are accepted by a seeded schedule, right or wrong.

    Each draft is accepted with `probability` if the one before it was: the geometric law that
    drafts of independent quality would follow. The schedule depends on seed, row and cycle alone.
    """

    inner: Proposer
    probability: float
    seed: int

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.inner.layer_ids

    def init_state(self, params: Params, batch: int, num_slots: int) -> Any:
        return self.inner.init_state(params, batch, num_slots)

    def absorb(
        self,
        params: Params,
        state: Any,
        features_BTM: jax.Array,
        tokens_BT: jax.Array,
        start_B: jax.Array,
        length_B: jax.Array,
    ) -> Any:
        return self.inner.absorb(params, state, features_BTM, tokens_BT, start_B, length_B)

    def propose(
        self,
        params: Params,
        state: Any,
        anchor_B: jax.Array,
        position_B: jax.Array,
        bound: BoundTarget,
        pick: Pick,
    ) -> jax.Array:
        return self.inner.propose(params, state, anchor_B, position_B, bound, pick)

    def forced_drafts(self, cycles_B: jax.Array) -> jax.Array:
        """See `decode.ForcedAcceptance`."""
        drafts = self.block_size - 1

        def one(row: jax.Array, cycle: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), row), cycle)
            hits = jax.random.uniform(key, (drafts,)) < self.probability
            return jnp.sum(jnp.cumprod(hits.astype(jnp.int32)))

        return jax.vmap(one)(jnp.arange(cycles_B.shape[0]), cycles_B)


def synthetic_drafter(
    drafter: Drafter,
    tau: float,
    block_size: int | None = None,
    seed: int = 0,
    draft_policy: str = "argmax",
) -> CustomDrafter:
    """The drafter with its acceptance forced to a mean of `tau` tokens a cycle, bonus included.

    Raises:
      ValueError: `tau` outside 1..block_size, or a block size of 1.
    """
    proposer, params = as_proposer(drafter, block_size, draft_policy)
    if proposer is None:
        raise ValueError("block_size: 1 is plain decoding; a synthetic acceptance needs drafts")
    if not 1 <= tau <= proposer.block_size:
        raise ValueError(
            f"synthetic_acceptance: {tau} must lie in 1..{proposer.block_size} (block_size)"
        )
    probability = acceptance_probability(tau, proposer.block_size)
    return CustomDrafter(SyntheticAcceptance(proposer, probability, seed), params)


def acceptance_probability(tau: float, block_size: int) -> float:
    """The p with `1 + p + p**2 + ... + p**(block_size - 1) == tau`, by bisection."""
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if sum(middle**k for k in range(block_size)) < tau:
            low = middle
        else:
            high = middle
    return high if tau > 1 else 0.0
