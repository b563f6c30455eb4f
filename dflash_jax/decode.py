"""The decode loop on the device: prefill, cycle (draft, verify, commit, materialize), and a
`lax.while_loop` over cycles.

Plain decoding is the same loop without a proposer: a block of one slot, nothing to accept but the
target's own token. Rows are independent; all per-row facts are arrays of `DecodeState`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dflash_jax import cache as kv
from dflash_jax.cache import KVCache
from dflash_jax.drafter import DFlashDrafter, block_embeddings
from dflash_jax.layers import apply
from dflash_jax.sampling import Sampling, SamplingMode, pick_tokens, token_logprobs
from dflash_jax.target import Params, TargetModel
from dflash_jax.verify import RUNNING, accept, truncate

Pick = Callable[[jax.Array, jax.Array], jax.Array]


class Proposer(Protocol):
    """What the cycle needs of a drafter: it absorbs committed features and proposes tokens.

    Hashable and static under jit; arrays live in its params and state (rows first in every leaf).
    A stub, an autoregressive drafter or another model can take DFlash's place.
    """

    @property
    def block_size(self) -> int:
        """G: the anchor and G - 1 proposals."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers whose features `absorb` receives."""

    def init_state(self, params: Params, batch: int, num_slots: int) -> Any:
        """An empty state for `num_slots` positions a row."""

    def absorb(
        self,
        params: Params,
        state: Any,
        features_BTM: jax.Array,
        tokens_BT: jax.Array,
        start_B: jax.Array,
        length_B: jax.Array,
    ) -> Any:
        """Takes features and tokens of positions `start .. start + T - 1`; positions `< length`
        are committed."""

    def propose(
        self,
        params: Params,
        state: Any,
        anchor_B: jax.Array,
        position_B: jax.Array,
        bound: BoundTarget,
        pick: Pick,
    ) -> jax.Array:
        """Ids [B, G - 1] for positions `position + 1 ..`; `position` is the anchor's."""


@runtime_checkable
class ForcedAcceptance(Protocol):
    """What a proposer may have besides, for cost measurements: the acceptance is then its choice
    and the output is not the target's."""

    def forced_drafts(self, cycles_B: jax.Array) -> jax.Array:
        """Drafts to accept in this cycle, right or wrong, [B] in 0..G-1; `cycles_B` is the number
        of cycles each row has been through."""


@dataclasses.dataclass(frozen=True)
class BoundTarget:
    """The parts of the target a drafter shares: embedding and head."""

    model: TargetModel
    params: Params

    def embed(self, tokens: jax.Array) -> jax.Array:
        return apply(self.model, self.params, tokens, method="embed")

    def head(self, hidden: jax.Array) -> jax.Array:
        hidden = hidden.astype(self.model.dtype)
        return apply(self.model, self.params, hidden, method="head")


@dataclasses.dataclass(frozen=True)
class DFlashProposer:
    """Drafts a block in one pass; its state is the cache of context keys and values, nothing else.

    `coupled` drafts take the same noise and filters as the target's tokens, so that at T > 0 both
    choose alike when their distributions do; "argmax" is the published policy. Both are lossless.

    Attributes:
      block_size: slots that a cycle verifies.
      draft_size: slots of the draft pass, the first `block_size` of which count. A drafter uses
        the masks that follow a slot: with fewer than in training it drafts the first slots worse
        (docs/results: 16 slots against 8), and they cost little beside the target's pass.
    """

    model: DFlashDrafter
    block_size: int
    draft_size: int
    coupled: bool = False

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.model.config.target_layer_ids

    def init_state(self, params: Params, batch: int, num_slots: int) -> KVCache:
        c = self.model.config
        return kv.init_cache(
            c.num_hidden_layers,
            batch,
            num_slots,
            c.num_key_value_heads,
            c.head_dim,
            self.model.dtype,
        )

    def absorb(
        self,
        params: Params,
        state: KVCache,
        features_BTM: jax.Array,
        tokens_BT: jax.Array,
        start_B: jax.Array,
        length_B: jax.Array,
    ) -> KVCache:
        del tokens_BT
        positions_BT = start_B[:, None] + jnp.arange(features_BTM.shape[1])
        context = apply(self.model, params, features_BTM, method="fuse")
        k, v = apply(self.model, params, context, positions_BT, method="materialize")
        return kv.commit(kv.write_layers(state, k, v, start_B), length_B)

    def propose(
        self,
        params: Params,
        state: KVCache,
        anchor_B: jax.Array,
        position_B: jax.Array,
        bound: BoundTarget,
        pick: Pick,
    ) -> jax.Array:
        mask_id = self.model.config.mask_token_id
        block = block_embeddings(bound.embed, anchor_B[:, None], self.draft_size, mask_id)
        hidden = apply(
            self.model, params, block, position_B[:, None], state.k, state.v, method="draft"
        )
        logits = bound.head(hidden[:, 0, 1 : self.block_size])
        if not self.coupled:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return pick(logits, position_B[:, None] + jnp.arange(1, self.block_size))


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """Everything static about a compiled loop.

    Attributes:
      target: the target's module.
      proposer: None = plain autoregressive decoding.
      mode: the richest sampling any row needs.
      logprobs: also record the target's log-probability of every emitted token.
      prefill_chunk: prompt tokens a prefill pass.
    """

    target: TargetModel
    proposer: Proposer | None
    mode: SamplingMode
    logprobs: bool
    prefill_chunk: int

    @property
    def block_size(self) -> int:
        return 1 if self.proposer is None else self.proposer.block_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return () if self.proposer is None else self.proposer.layer_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of a batch between cycles; rows first in every leaf.

    Attributes:
      cache: the target's; `cache.length_B` is the position of each row's anchor: every token
        before it is
        committed to the caches, the anchor itself is known but not yet processed.
      draft: the proposer's state (None in plain decoding).
      tokens_BS: prompt and emitted ids by absolute position; valid up to and including the anchor.
      logprobs_BS: by absolute position like `tokens_BS`; width 0 unless requested.
      limit_B: int32, one past the last position a row may emit (prompt length + budget).
      finish_B: int32, verify.RUNNING, STOP or LENGTH.
      stop_ids_BN: int32, padded with -1.
      sampling: temperature, top-k, top-p and seed of each row.
      accepted_BS: int32, tokens committed in each cycle of the row, 0 beyond `cycles_B`.
      cycles_B: int32, cycles the row took part in.
      cut_B: bool, the row's last cycle was cut by a stop id or its budget.
    """

    cache: KVCache
    draft: Any
    tokens_BS: jax.Array
    logprobs_BS: jax.Array
    limit_B: jax.Array
    finish_B: jax.Array
    stop_ids_BN: jax.Array
    sampling: Sampling
    accepted_BS: jax.Array
    cycles_B: jax.Array
    cut_B: jax.Array


@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Parameter trees of a loop; `draft` is None in plain decoding."""

    target: Params
    draft: Params


jax.tree_util.register_dataclass(DecodeParams)


def _forward(
    spec: DecodeSpec, params: DecodeParams, tokens_BT: jax.Array, cache: KVCache
) -> tuple[jax.Array, jax.Array, KVCache]:
    return apply(spec.target, params.target, tokens_BT, cache, layer_ids=spec.layer_ids)


def _write_rows(rows_BS: jax.Array, new_BT: jax.Array, start_B: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice(row, new, (i,)))(
        rows_BS, new_BT.astype(rows_BS.dtype), start_B
    )


@partial(jax.jit, static_argnames="spec")
def prefill(
    spec: DecodeSpec,
    params: DecodeParams,
    tokens_BS: jax.Array,
    prompt_length_B: jax.Array,
    limit_B: jax.Array,
    stop_ids_BN: jax.Array,
    sampling: Sampling,
) -> DecodeState:
    """Processes the prompts in chunks, gives the proposer the features of all of them, and emits
    the first token.

    Args:
      tokens_BS: prompts, padded on the right to the cache's slots. S must be a multiple of the
        chunk and at
        least `max(limit) + block_size`.
      prompt_length_B: >= 1.
      limit_B: prompt length + budget; a row whose budget is 0 is finished at once.
    """
    batch, slots = tokens_BS.shape
    chunk = spec.prefill_chunk
    cache = spec.target.init_cache(batch, slots)
    draft = None if spec.proposer is None else spec.proposer.init_state(params.draft, batch, slots)
    hidden_size = spec.target.config.hidden_size
    last_BD = jnp.zeros((batch, hidden_size), spec.target.dtype)

    def one_chunk(i: jax.Array, carry: tuple[KVCache, Any, jax.Array]) -> Any:
        cache, draft, last_BD = carry
        start_B = jnp.full((batch,), i * chunk, jnp.int32)
        tokens_BT = jax.lax.dynamic_slice_in_dim(tokens_BS, i * chunk, chunk, axis=1)
        hidden, features, cache = _forward(spec, params, tokens_BT, kv.commit(cache, start_B))
        if spec.proposer is not None:
            end_B = jnp.minimum(prompt_length_B, start_B + chunk)
            draft = spec.proposer.absorb(params.draft, draft, features, tokens_BT, start_B, end_B)
        offset_B = prompt_length_B - 1 - start_B
        here = (offset_B >= 0) & (offset_B < chunk)
        index = jnp.clip(offset_B, 0, chunk - 1)[:, None, None]
        found = jnp.take_along_axis(hidden, index, axis=1)[:, 0]
        return cache, draft, jnp.where(here[:, None], found, last_BD)

    num_chunks = (jnp.max(prompt_length_B) + chunk - 1) // chunk
    cache, draft, last_BD = jax.lax.fori_loop(0, num_chunks, one_chunk, (cache, draft, last_BD))
    logits_B1V = BoundTarget(spec.target, params.target).head(last_BD[:, None])
    first_B1 = pick_tokens(logits_B1V, prompt_length_B[:, None], sampling, spec.mode)
    count_B, finish_B = truncate(
        first_B1, jnp.ones((batch,), jnp.int32), limit_B - prompt_length_B, stop_ids_BN
    )
    logprobs_BS = jnp.zeros((batch, slots if spec.logprobs else 0), jnp.float32)
    if spec.logprobs:
        logprobs_BS = _write_rows(
            logprobs_BS, token_logprobs(logits_B1V, first_B1), prompt_length_B
        )
    # Without a budget there is no anchor: the row is finished and its last position stays the
    # prompt's.
    return DecodeState(
        cache=kv.commit(cache, prompt_length_B - 1 + count_B),
        draft=draft,
        tokens_BS=_write_rows(tokens_BS, first_B1, prompt_length_B),
        logprobs_BS=logprobs_BS,
        limit_B=limit_B,
        finish_B=finish_B,
        stop_ids_BN=stop_ids_BN,
        sampling=sampling,
        accepted_BS=jnp.zeros((batch, slots), jnp.int32),
        cycles_B=jnp.zeros((batch,), jnp.int32),
        cut_B=jnp.zeros((batch,), bool),
    )


def cycle(spec: DecodeSpec, params: DecodeParams, state: DecodeState) -> DecodeState:
    """One cycle of every running row: draft, verify, accept, commit, materialize."""
    position_B = state.cache.length_B
    anchor_B1 = jnp.take_along_axis(state.tokens_BS, position_B[:, None], axis=1)
    block = spec.block_size
    bound = BoundTarget(spec.target, params.target)

    def pick(logits_BGV: jax.Array, positions_BG: jax.Array) -> jax.Array:
        return pick_tokens(logits_BGV, positions_BG, state.sampling, spec.mode)

    if spec.proposer is None or block == 1:
        drafts_BD = jnp.zeros((anchor_B1.shape[0], 0), jnp.int32)
    else:
        drafts_BD = spec.proposer.propose(
            params.draft, state.draft, anchor_B1[:, 0], position_B, bound, pick
        )
    block_BG = jnp.concatenate([anchor_B1, drafts_BD], axis=1)
    hidden, features, cache = _forward(spec, params, block_BG, state.cache)
    logits_BGV = bound.head(hidden)
    emitted_BG = pick(logits_BGV, position_B[:, None] + jnp.arange(1, block + 1))
    forced_B = None
    proposer: Any = spec.proposer  # may speak both protocols
    if isinstance(proposer, ForcedAcceptance):
        forced_B = proposer.forced_drafts(state.cycles_B)
    taken = accept(
        drafts_BD,
        emitted_BG,
        state.finish_B,
        state.limit_B - 1 - position_B,
        state.stop_ids_BN,
        forced_B,
    )
    end_B = position_B + taken.count_B
    draft = state.draft
    if spec.proposer is not None:
        draft = spec.proposer.absorb(params.draft, draft, features, block_BG, position_B, end_B)
    logprobs_BS = state.logprobs_BS
    if spec.logprobs:
        new_BG = token_logprobs(logits_BGV, emitted_BG)
        logprobs_BS = _write_running(logprobs_BS, new_BG, position_B + 1, taken.count_B)
    ran_B = (taken.count_B > 0).astype(jnp.int32)
    return dataclasses.replace(
        state,
        cache=kv.commit(cache, end_B),
        draft=draft,
        tokens_BS=_write_running(state.tokens_BS, emitted_BG, position_B + 1, taken.count_B),
        logprobs_BS=logprobs_BS,
        finish_B=taken.finish_B,
        accepted_BS=_write_running(
            state.accepted_BS, taken.count_B[:, None], state.cycles_B, taken.count_B
        ),
        cycles_B=state.cycles_B + ran_B,
        cut_B=state.cut_B | taken.cut_B,
    )


def _write_running(
    rows_BS: jax.Array, new_BT: jax.Array, start_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """Writes the T entries of rows that committed something; what lies beyond the count is
    stale."""
    old_BT = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (new_BT.shape[1],)))(
        rows_BS, start_B
    )
    kept = jnp.where((count_B > 0)[:, None], new_BT.astype(rows_BS.dtype), old_BT)
    return _write_rows(rows_BS, kept, start_B)


@partial(jax.jit, static_argnames="spec", donate_argnames="state")
def run_cycles(
    spec: DecodeSpec, params: DecodeParams, state: DecodeState, max_cycles: jax.Array
) -> DecodeState:
    """Cycles until every row has finished, `max_cycles` at most. The state's buffers are
    donated."""

    def going(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        done, state = carry
        return (done < max_cycles) & jnp.any(state.finish_B == RUNNING)

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        done, state = carry
        return done + 1, cycle(spec, params, state)

    return jax.lax.while_loop(going, body, (jnp.int32(0), state))[1]
