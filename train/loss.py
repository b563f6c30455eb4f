"""The drafter's loss (DFlash, arXiv 2602.06036, Eq. 4; D-PACE, arXiv 2605.18810).

Everything returned is a sum over rows, so that devices and accumulation steps add up exactly;
`mean_loss` divides once. The full-vocabulary head is applied a few blocks at a time and again in
the backward pass: logits of all blocks, [B, A, G, V], never exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.block_attention_vjp import split_anchors
from dflash_jax.drafter import DFlashDrafter, block_embeddings
from dflash_jax.target import TargetModel

KINDS = ("decay", "uniform", "dpace")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """How slots are weighed.

    Attributes:
      kind: "decay", weight `exp(-(k - 1) / gamma)` at slot k (Eq. 4); "uniform", 1; "dpace", by
        the drafter's own confidence up to the slot. The first two are means over slots (the
        denominator is the sum of weights), D-PACE is a mean over rows with a supervised slot.
      gamma: of "decay"; 7 / 5 / 4 for blocks of 16 / 10 / 8.
      alpha: of "dpace": 0 counts the chance that all slots so far are right, 1 only their number.
      chunk_blocks: blocks a row whose logits are alive at once.

    Raises:
      ValueError: a value out of range, with its name.
    """

    kind: str
    gamma: float
    alpha: float = 0.5
    chunk_blocks: int = 8

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {KINDS}")
        if self.gamma <= 0:
            raise ValueError(f"gamma: {self.gamma} must be above 0")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: {self.alpha} must be in 0..1")
        if self.chunk_blocks < 1:
            raise ValueError(f"chunk_blocks: {self.chunk_blocks} must be at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Float32 sums over rows and blocks; add those of other devices and steps with `jax.tree.map`.

    Attributes:
      numerator, denominator: of the loss; only the numerator has a gradient.
      correct_G, supervised_G: by slot, undecayed: slots whose argmax is the label, and slots with a
        label. Entry 0 (the anchor) is 0. Accuracy is the ratio.
      accepted: simulated acceptance lengths, leading correct slots + 1 (the bonus token). A block
        that the response's end cuts short counts no further.
      blocks: blocks with a supervised slot, so `accepted / blocks` is a simulated tau.
    """

    numerator: jax.Array
    denominator: jax.Array
    correct_G: jax.Array
    supervised_G: jax.Array
    accepted: jax.Array
    blocks: jax.Array


def mean_loss(sums: LossSums) -> jax.Array:
    """`numerator / denominator`, and 0 with a zero gradient where nothing was supervised."""
    return sums.numerator / jnp.where(sums.denominator > 0, sums.denominator, 1.0)


def block_labels(
    tokens_BT: jax.Array,
    loss_mask_BT: jax.Array,
    anchors_BA: jax.Array,
    valid_BA: jax.Array,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """What each slot is to predict: the token AT `anchor + k`, no shift.

    Returns:
      labels_BAG: int32, 0 where unsupervised.
      supervised_BAG: False at slot 0, beyond the row, outside the loss mask, at invalid anchors.
    """
    batch, length = tokens_BT.shape
    positions_BAG = anchors_BA[..., None] + jnp.arange(block_size)
    inside = jnp.minimum(positions_BAG, length - 1).reshape(batch, -1)
    tokens, mask = (
        jnp.take_along_axis(x, inside, axis=1).reshape(positions_BAG.shape)
        for x in (tokens_BT, loss_mask_BT.astype(bool))
    )
    supervised = mask & valid_BA[..., None] & (positions_BAG < length)
    supervised &= jnp.arange(block_size) > 0
    return jnp.where(supervised, tokens, 0).astype(jnp.int32), supervised


def slot_weights(supervised: jax.Array, label_probs: jax.Array, config: LossConfig) -> jax.Array:
    """Weights of the slots 1..G-1, [..., G - 1]; 0 where unsupervised.

    D-PACE: with `q_k` the probability of the label and `s_k = (1 - alpha) q_k + alpha` (1 where
    unsupervised), the chance to get as far as slot k is `P_k = s_1 ... s_k`, and slot k weighs what
    depends on it: the sum of `P_m` over supervised `m >= k`.

    Args:
      supervised, label_probs: [..., G - 1], slot 0 left out. Only D-PACE reads the probabilities,
        which must be detached.
    """
    if config.kind == "uniform":
        weights = jnp.ones(supervised.shape, jnp.float32)
    elif config.kind == "decay":
        weights = jnp.exp(-jnp.arange(supervised.shape[-1]) / config.gamma)
    else:
        steps = jnp.where(supervised, (1 - config.alpha) * label_probs + config.alpha, 1.0)
        reach = jnp.where(supervised, jnp.cumprod(steps, axis=-1), 0.0)
        weights = jnp.flip(jnp.cumsum(jnp.flip(reach, -1), axis=-1), -1)
    return jnp.where(supervised, weights, 0.0)


def head_loss(
    head_fn: Callable[[jax.Array], jax.Array],
    hidden_BAGD: jax.Array,
    labels_BAG: jax.Array,
    supervised_BAG: jax.Array,
    config: LossConfig,
) -> LossSums:
    """Weighted full-vocabulary cross-entropy, `config.chunk_blocks` blocks a row at a time.

    Args:
      head_fn: hidden [..., D] -> float32 logits [..., V]. Slot 0 never reaches it.
      hidden_BAGD: the drafter's normed hidden states.
      labels_BAG, supervised_BAG: from `block_labels`.
    """
    chunk = min(config.chunk_blocks, hidden_BAGD.shape[1])
    chunks = tuple(
        split_anchors(x[:, :, 1:], chunk) for x in (hidden_BAGD, labels_BAG, supervised_BAG)
    )

    @jax.checkpoint
    def step(sums: tuple, chunk: tuple) -> tuple[tuple, None]:
        hidden, labels, supervised = chunk
        logits = head_fn(hidden).astype(jnp.float32)
        # A masked sum, not a gather: it stays local where the vocabulary is sharded.
        is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
        label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        nll = jax.nn.logsumexp(logits, axis=-1) - label_logit
        weights = slot_weights(supervised, jax.lax.stop_gradient(jnp.exp(-nll)), config)
        correct = supervised & (jnp.argmax(logits, axis=-1) == labels)
        leading = jnp.sum(jnp.cumprod(correct, axis=-1), dtype=jnp.float32)
        parts = (
            jnp.sum(weights * nll),
            jnp.sum(weights),
            jnp.sum(correct, axis=(0, 1), dtype=jnp.float32),
            leading,
        )
        return jax.tree.map(jnp.add, sums, parts), None

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(labels_BAG.shape[-1] - 1, jnp.float32), zero)
    (numerator, weight, correct, leading), _ = jax.lax.scan(step, start, chunks)
    blocks = jnp.sum(jnp.any(supervised_BAG, axis=-1), dtype=jnp.float32)
    rows = jnp.sum(jnp.any(supervised_BAG, axis=(1, 2)), dtype=jnp.float32)
    return LossSums(
        numerator=numerator,
        denominator=jax.lax.stop_gradient(rows if config.kind == "dpace" else weight),
        correct_G=jnp.pad(correct, (1, 0)),
        supervised_G=jnp.sum(supervised_BAG, axis=(0, 1), dtype=jnp.float32),
        accepted=leading + blocks,
        blocks=blocks,
    )


def drafter_loss(
    target_model: TargetModel,
    target_params: Any,
    drafter_model: DFlashDrafter,
    drafter_params: Any,
    batch: Mapping[str, jax.Array],
    features_BTM: jax.Array,
    anchors_BA: jax.Array,
    valid_BA: jax.Array,
    config: LossConfig,
    attention: str = "chunked",
) -> LossSums:
    """The loss of all blocks of a batch in one pass; block size and mask id are the drafter's.

    Args:
      target_params: frozen: embedding and head get no gradient.
      batch: `tokens_BT` and `loss_mask_BT`.
      features_BTM: the target's tapped features of `tokens_BT` (`target_forward`).
      anchors_BA, valid_BA: from `train.anchors`.
      attention: implementation of `context_block_attention`.
    """
    frozen = jax.lax.stop_gradient({"params": target_params})
    apply_target: Any = partial(target_model.apply, frozen)
    apply_drafter: Any = partial(drafter_model.apply, {"params": drafter_params})
    c = drafter_model.config
    anchor_tokens_BA = jnp.take_along_axis(batch["tokens_BT"], anchors_BA, axis=1)
    embeddings_BAGD = block_embeddings(
        partial(apply_target, method="embed"),
        anchor_tokens_BA,
        c.block_size,
        c.mask_token_id,
    )
    hidden_BAGD = apply_drafter(features_BTM, embeddings_BAGD, anchors_BA, attention)
    labels_BAG, supervised_BAG = block_labels(
        batch["tokens_BT"], batch["loss_mask_BT"], anchors_BA, valid_BA, c.block_size
    )
    return head_loss(
        partial(apply_target, method="head"),
        hidden_BAGD.astype(target_model.dtype),
        labels_BAG,
        supervised_BAG,
        config,
    )
