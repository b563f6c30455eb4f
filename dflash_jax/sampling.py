"""Choosing tokens: temperature, top-k, top-p, with noise keyed by (row seed, absolute position).

A token is `argmax(filtered(logits / T) + Gumbel)`, which draws from the softmax. Because the noise
depends on nothing but the row's seed and the position, plain and speculative decoding choose the
same token for the same logits, whatever the drafter, the block size or the batch.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.attention import MASKED

Rows = Any  # an array with one entry a row; numpy on the host
# Lower ones are this one: the draw is greedy already, and logits / T must stay above `MASKED`.
MIN_TEMPERATURE = 1e-6


class SamplingMode(enum.Enum):
    """What a compiled loop has to be able to do. Every row gives the same tokens under a richer
    mode."""

    GREEDY = "greedy"
    SAMPLE = "sample"
    FILTER = "filter"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of each row.

    Attributes:
      temperature_B: float32, 0 = greedy (argmax, ties to the lowest id).
      top_k_B: int32, 0 = off. Ties with the k-th logit stay in.
      top_p_B: float32 in (0, 1], 1 = off. The smallest set of most likely tokens whose probability
        reaches
        top_p, after temperature and top-k; ties with its last member stay in.
      seed_B: uint32.
    """

    temperature_B: Rows
    top_k_B: Rows
    top_p_B: Rows
    seed_B: Rows


def filter_logits(logits_BGV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Logits outside top-k, then outside top-p, become `MASKED`."""
    vocab = logits_BGV.shape[-1]
    sorted_BGV = -jnp.sort(-logits_BGV, axis=-1)
    kth = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, vocab), vocab)[:, None, None] - 1
    cut_k = jnp.take_along_axis(
        sorted_BGV, jnp.broadcast_to(kth, (*logits_BGV.shape[:-1], 1)), axis=-1
    )
    probs = jax.nn.softmax(jnp.where(sorted_BGV >= cut_k, sorted_BGV, MASKED), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = jnp.where(
        (before < top_p_B[:, None, None]) | (top_p_B >= 1)[:, None, None], sorted_BGV, jnp.inf
    )
    # The most likely token always stays, so the cut is finite.
    cut_p = jnp.minimum(jnp.min(kept, axis=-1, keepdims=True), sorted_BGV[..., :1])
    return jnp.where(logits_BGV >= jnp.maximum(cut_k, cut_p), logits_BGV, MASKED)


def gumbel_noise(seed_B: jax.Array, positions_BG: jax.Array, vocab: int) -> jax.Array:
    """[B, G, V] float32, a function of (seed, position, id) alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))

    return jax.vmap(jax.vmap(one, (None, 0)))(seed_B, positions_BG)


def pick_tokens(
    logits_BGV: jax.Array, positions_BG: jax.Array, sampling: Sampling, mode: SamplingMode
) -> jax.Array:
    """The ids [B, G] AT `positions_BG` given float32 logits that predict them."""
    greedy = jnp.argmax(logits_BGV, axis=-1).astype(jnp.int32)
    if mode is SamplingMode.GREEDY:
        return greedy
    hot_B11 = (sampling.temperature_B > 0)[:, None, None]
    scaled = logits_BGV / jnp.maximum(sampling.temperature_B, MIN_TEMPERATURE)[:, None, None]
    if mode is SamplingMode.FILTER:
        scaled = filter_logits(scaled, sampling.top_k_B, sampling.top_p_B)
    noise = gumbel_noise(sampling.seed_B, positions_BG, logits_BGV.shape[-1])
    sampled = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(hot_B11[..., 0], sampled, greedy)


def token_logprobs(logits_BGV: jax.Array, tokens_BG: jax.Array) -> jax.Array:
    """[B, G] natural log-probabilities under the unmodified logits (no temperature, no filter)."""
    picked = jnp.take_along_axis(logits_BGV, tokens_BG[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits_BGV, axis=-1)
