"""The drafter's loss (DFlash, arXiv 2602.06036, Eq. 4; D-PACE, arXiv 2605.18810).

Everything returned is a sum over rows, so that devices and accumulation steps add up exactly;
`mean_loss` divides once. The full-vocabulary head is applied a few blocks at a time: logits of all
blocks, [B, A, G, V], never exist. The head is frozen and the loss a sum over slots, so that the
gradient of the hidden states is made beside the loss, from the same logits, and kept in their
place: the backward pass only scales it.
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
from train.labels import block_labels, greedy_labels

KINDS = ("decay", "uniform", "dpace")
LABELS = ("data", "target")
HeadFn = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What slots are to predict and how they are weighed.

    Attributes:
      kind: "decay", weight `exp(-(k - 1) / gamma)` at slot k (Eq. 4); "uniform", 1; "dpace", by
        the drafter's own confidence up to the slot. The first two are means over slots (the
        denominator is the sum of weights), D-PACE is a mean over rows with a supervised slot.
      gamma: of "decay"; 7 / 5 / 4 for blocks of 16 / 10 / 8.
      alpha: of "dpace": 0 counts the chance that all slots so far are right, 1 only their number.
      labels: "data", the tokens of the row; "target", the target's argmax (`greedy_labels`).
      soft_weight: w of the slot's loss `(1 - w) CE(label) + w CE(the target's distribution)`, both
        given the tokens of the row before the slot, at temperature 1.
      chunk_bytes: float32 logits alive at once, of all devices together; one block a row at least.

    Raises:
      ValueError: a value out of range, with its name.
    """

    kind: str
    gamma: float
    alpha: float = 0.5
    labels: str = "data"
    soft_weight: float = 0.0
    chunk_bytes: int = 2 * 1024**3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {KINDS}")
        if self.gamma <= 0:
            raise ValueError(f"gamma: {self.gamma} must be above 0")
        if self.labels not in LABELS:
            raise ValueError(f"labels: {self.labels!r} is not one of {LABELS}")
        for name in ("alpha", "soft_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be in 0..1")
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} must be at least 1")

    @property
    def needs_target_logits(self) -> bool:
        """Whether the target's own predictions are asked for, not its features alone."""
        return self.labels == "target" or self.soft_weight > 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Float32 sums over rows and blocks; add those of other devices and steps with `jax.tree.map`.

    Attributes:
      numerator, denominator: of the loss; only the numerator has a gradient.
      correct_G, supervised_G: by slot, undecayed: slots whose label has the largest logit, and
        slots with a label. Entry 0 (the anchor) is 0. Accuracy is the ratio.
      accepted: simulated acceptance lengths, leading correct slots + 1 (the bonus token). A block
        counts up to its last supervised slot only: the response's end or, with the target's own
        labels, the place where the row leaves them cut it short.
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


def target_predictions(head_fn: HeadFn, hidden_BTD: jax.Array, config: LossConfig) -> jax.Array:
    """The argmax of the target's logits at every position, int32 [B, T], a few at a time."""
    chunks = split_anchors(hidden_BTD, _chunk(head_fn, hidden_BTD[:, :, None], config))
    ids = jax.lax.map(lambda x: jnp.argmax(head_fn(x), axis=-1).astype(jnp.int32), chunks)
    return _join(ids)[:, : hidden_BTD.shape[1]]


def _chunk(head_fn: HeadFn, slots_BAGD: jax.Array, config: LossConfig, copies: int = 1) -> int:
    """How many of A to take at once: as few parts as the limit allows, of about equal size."""
    batch, length, slots, _ = slots_BAGD.shape
    vocabulary = jax.eval_shape(head_fn, slots_BAGD).shape[-1]
    most = max(1, config.chunk_bytes // (4 * copies * batch * slots * vocabulary))
    return -(-length // -(-length // most))


def _join(chunks: jax.Array) -> jax.Array:
    """The inverse of `split_anchors`, but for the zeros at the tail."""
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1, *chunks.shape[3:])


def head_loss(
    head_fn: HeadFn,
    hidden_BAGD: jax.Array,
    labels_BAG: jax.Array,
    supervised_BAG: jax.Array,
    config: LossConfig,
    teacher_BAGD: jax.Array | None = None,
) -> LossSums:
    """Weighted full-vocabulary cross-entropy, `config.chunk_bytes` of logits at a time.

    Only `hidden_BAGD` gets a gradient, and nothing that `head_fn` closes over.

    Args:
      head_fn: hidden [..., D] -> float32 logits [..., V]. Slot 0 never reaches it.
      hidden_BAGD: the drafter's normed hidden states.
      labels_BAG, supervised_BAG: from `block_labels` or `greedy_labels`.
      teacher_BAGD: the target's final hidden states before each slot's token, for `soft_weight`.
    """
    if (teacher_BAGD is not None) != (config.soft_weight > 0):
        raise ValueError(f"teacher_BAGD is for soft_weight {config.soft_weight} above 0")
    slots = jax.tree.map(
        lambda x: x[:, :, 1:], (hidden_BAGD, labels_BAG, supervised_BAG, teacher_BAGD)
    )
    numerator, weight, correct, leading = _head_sums(head_fn, config, *slots)
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head_sums(head_fn: HeadFn, config: LossConfig, *slots: jax.Array | None) -> tuple:
    """(numerator, sum of weights, correct [G - 1], leading correct) of slots 1..G-1."""
    return _scan_chunks(head_fn, config, slots, False)[0]


def _head_sums_forward(head_fn: HeadFn, config: LossConfig, *slots: Any) -> tuple[tuple, jax.Array]:
    sums, hidden_bar = _scan_chunks(head_fn, config, slots, True)
    return sums, _join(hidden_bar)[:, : slots[0].shape[1]]


def _head_sums_backward(
    head_fn: HeadFn, config: LossConfig, hidden_bar: jax.Array, sums_bar: tuple
) -> tuple[jax.Array, None, None, None]:
    scaled = hidden_bar.astype(jnp.float32) * sums_bar[0]
    return scaled.astype(hidden_bar.dtype), None, None, None


_head_sums.defvjp(_head_sums_forward, _head_sums_backward)


def _scan_chunks(
    head_fn: HeadFn, config: LossConfig, slots: tuple[Any, ...], with_gradient: bool
) -> tuple[tuple, Any]:
    """The sums of `_head_sums` and, chunk by chunk, the numerator's gradient of the hidden states
    in their dtype (None without)."""
    hidden, labels, *_, teacher = slots
    size = _chunk(head_fn, hidden, config, copies=1 if teacher is None else 2)

    def float32_head(x: jax.Array) -> jax.Array:
        return head_fn(x).astype(jnp.float32)

    def step(sums: tuple, chunk: tuple) -> tuple[tuple, Any]:
        hidden, labels, supervised, teacher = chunk
        if with_gradient:
            logits, pull_back = jax.vjp(float32_head, hidden)
        else:
            logits = float32_head(hidden)
        # A masked sum, not a gather: it stays local where the vocabulary is sharded.
        is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
        label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        top = jnp.max(logits, axis=-1)
        log_total = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
        nll = log_total - label_logit
        weights = slot_weights(supervised, jnp.exp(-nll), config)
        loss, goal = nll, is_label.astype(jnp.float32)
        if teacher is not None:
            w, probs = config.soft_weight, jax.nn.softmax(float32_head(teacher))
            loss = log_total - (1 - w) * label_logit - w * jnp.sum(probs * logits, axis=-1)
            goal = (1 - w) * goal + w * probs
        correct = supervised & (label_logit == top)
        leading = jnp.sum(jnp.cumprod(correct, axis=-1), dtype=jnp.float32)
        parts = (
            jnp.sum(weights * loss),
            jnp.sum(weights),
            jnp.sum(correct, axis=(0, 1), dtype=jnp.float32),
            leading,
        )
        sums = jax.tree.map(jnp.add, sums, parts)
        if not with_gradient:
            return sums, None
        probs = jnp.exp(logits - log_total[..., None])
        return sums, pull_back(weights[..., None] * (probs - goal))[0]

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(labels.shape[-1], jnp.float32), zero)
    return jax.lax.scan(step, start, jax.tree.map(lambda x: split_anchors(x, size), slots))


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
    hidden_BTD: jax.Array | None = None,
) -> LossSums:
    """The loss of all blocks of a batch in one pass; block size and mask id are the drafter's.

    Args:
      target_params: frozen: embedding and head get no gradient.
      batch: `tokens_BT` and `loss_mask_BT`.
      features_BTM: the target's tapped features of `tokens_BT` (`target_forward`).
      anchors_BA, valid_BA: from `train.anchors`.
      attention: implementation of `context_block_attention`.
      hidden_BTD: the target's final hidden states of `tokens_BT`, if the config needs its logits.
    """
    if config.needs_target_logits and hidden_BTD is None:
        raise ValueError(
            f"hidden_BTD is needed: labels {config.labels!r}, soft_weight {config.soft_weight}"
        )
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
    head_fn = partial(apply_target, method="head")
    tokens_BT, length = batch["tokens_BT"], batch["tokens_BT"].shape[1]
    place = (batch["loss_mask_BT"], anchors_BA, valid_BA, c.block_size)
    if config.labels == "target":
        assert hidden_BTD is not None
        predicted_BT = target_predictions(head_fn, hidden_BTD, config)
        labels_BAG, supervised_BAG = greedy_labels(tokens_BT, predicted_BT, *place)
    else:
        labels_BAG, supervised_BAG = block_labels(tokens_BT, *place)
    teacher_BAGD = None
    if config.soft_weight > 0:
        before_BAG = anchors_BA[..., None] + jnp.arange(c.block_size) - 1
        teacher_BAGD = jax.vmap(lambda hidden, at: hidden[jnp.clip(at, 0, length - 1)])(
            hidden_BTD, before_BAG
        )
    return head_loss(
        head_fn,
        hidden_BAGD.astype(target_model.dtype),
        labels_BAG,
        supervised_BAG,
        config,
        teacher_BAGD,
    )
