"""Tiny targets and stub drafters: output must be the same under all of them, acceptance may differ.

A stub knows the target's continuation. ORACLE drafts all of it, PARTIAL-k is right for exactly k
tokens a block, NEVER is wrong at once. One compiled loop serves them all: `right` is an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.decode import BoundTarget, Pick
from dflash_jax.drafter import DFlashDrafter, Drafter, init_drafter
from dflash_jax.generation import CustomDrafter, GenerationOutput, generate_ids
from dflash_jax.target import Target, TargetModel, init_target, target_forward

BLOCK = 8
SLOTS = 128
CONTEXT = 112  # the target's limit, so that one cache size serves every test
CHUNK = 8
NEW = 40
ORACLE, NEVER = BLOCK - 1, 0
STUBS = {"oracle": ORACLE, "never": NEVER, "partial1": 1, "partial3": 3, "partial6": 6}
TAPS = (0, 1)
OPTIONS: dict[str, Any] = {"num_slots": SLOTS, "prefill_chunk": CHUNK, "stop_token_ids": ()}


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A `decode.Proposer` that reads its drafts from a script and records what it absorbs.

    params: "script_BS" the right token at every position, "right_B" how many drafts of a block are
    right. State: the features and tokens by position, and the committed length.
    """

    block_size: int
    vocab_size: int
    feature_size: int
    layer_ids: tuple[int, ...] = TAPS

    def init_state(self, params: Any, batch: int, num_slots: int) -> dict[str, jax.Array]:
        return {
            "features_BSM": jnp.zeros((batch, num_slots, self.feature_size)),
            "tokens_BS": jnp.full((batch, num_slots), -1, jnp.int32),
            "length_B": jnp.zeros((batch,), jnp.int32),
        }

    def absorb(self, params, state, features_BTM, tokens_BT, start_B, length_B):
        def put(old, new, start):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, 0)

        return {
            "features_BSM": jax.vmap(put)(state["features_BSM"], features_BTM, start_B),
            "tokens_BS": jax.vmap(put)(state["tokens_BS"], tokens_BT, start_B),
            "length_B": length_B,
        }

    def propose(
        self,
        params: Any,
        state: Any,
        anchor_B: jax.Array,
        position_B: jax.Array,
        bound: BoundTarget,
        pick: Pick,
    ) -> jax.Array:
        offsets = jnp.arange(self.block_size - 1)
        positions = position_B[:, None] + 1 + offsets
        truth = jnp.take_along_axis(params["script_BS"], positions, axis=1, mode="clip")
        wrong = (truth + 1) % self.vocab_size
        return jnp.where(offsets < params["right_B"][:, None], truth, wrong)


def random_params(init: Callable[[], Any], scale: float) -> Any:
    """Normal matrices, unit norms, zero biases in the shapes of `init`, which is not compiled."""
    rng = np.random.default_rng(3)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        fill = {"scale": 1.0, "bias": 0.0}.get(path[-1].key)
        if fill is not None:
            return jnp.full(shape.shape, fill)
        return jnp.asarray(rng.normal(0, scale, shape.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init))


@cache
def tiny_target(model_type: str = "qwen3", **changes: Any) -> Target:
    """Random weights, scaled up so that greedy continuations wander and do not repeat a token."""
    config = TargetConfig.tiny(
        model_type,
        **{
            "vocab_size": 128,
            "num_hidden_layers": 2,
            "max_position_embeddings": CONTEXT,
            **changes,
        },
    )
    params = random_params(lambda: init_target(config).params, 0.3)
    return Target(config, TargetModel(config, jnp.dtype("float32")), params, name="tiny")


@cache
def tiny_drafter(**changes: Any) -> Drafter:
    """An untrained DFlash drafter for `tiny_target()`."""
    target = tiny_target()
    config = DrafterConfig.for_target(
        target.config,
        **{
            "mask_token_id": target.config.vocab_size - 1,
            "num_layers": 2,
            "block_size": BLOCK,
            "target_layer_ids": TAPS,
            **changes,
        },
    )
    params = random_params(lambda: init_drafter(target, config).params, 0.16)
    return Drafter(config, DFlashDrafter(config, jnp.dtype("float32")), params)


def stub(
    target: Target,
    sequences: Sequence[Sequence[int]],
    right: int | Sequence[int],
    block_size: int = BLOCK,
    num_slots: int = SLOTS,
) -> CustomDrafter:
    """A scripted drafter; `sequences` are prompts with their continuations, one a row."""
    script = np.zeros((len(sequences), num_slots), np.int32)
    for row, sequence in zip(script, sequences, strict=True):
        row[: len(sequence)] = sequence
    right_B = np.broadcast_to(np.asarray(right, np.int32), (len(sequences),))
    config = target.config
    proposer = Scripted(block_size, config.vocab_size, config.hidden_size * len(TAPS))
    return CustomDrafter(proposer, {"script_BS": script, "right_B": right_B})


def random_prompts(lengths: Sequence[int], vocab_size: int = 128, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size - 1, length).tolist() for length in lengths]


def greedy_reference(target: Target, prompts: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """`count` greedy tokens a prompt by whole uncached passes: no cache, no loop, no chunks."""
    tokens = np.zeros((len(prompts), SLOTS), np.int32)
    ends = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for _ in range(count):
        logits, _ = target_forward(target, tokens)
        tokens[rows, ends] = np.asarray(logits)[rows, ends - 1].argmax(-1)
        ends += 1
    return np.stack([row[end - count : end] for row, end in zip(tokens, ends, strict=True)])


def run(
    target: Target, drafter: Drafter | CustomDrafter | None, prompts: Any, **options: Any
) -> GenerationOutput:
    """`generate_ids` at the rig's fixed sizes: one compilation per batch size and drafter."""
    return generate_ids(target, drafter, prompts, **{"max_new_tokens": NEW, **OPTIONS, **options})


def row_of(out: GenerationOutput, row: int) -> tuple:
    """Everything reported about one row, for comparison with another run."""
    return (
        out.token_ids[row],
        out.acceptance_lengths[row],
        out.finish_reasons[row],
        out.cut[row],
    )


def expected(
    continuation: Sequence[int], budget: int, stops: Sequence[int], right: int, block: int = BLOCK
) -> tuple[list[int], list[int], str]:
    """Ids, acceptance lengths and finish reason of a stub run, by a plain Python loop."""
    ids: list[int] = []
    lengths: list[int] = []
    if budget == 0:
        return ids, lengths, "length"
    size = 1  # the prefill's token
    while True:
        taken = []
        for token in continuation[len(ids) : len(ids) + size]:
            taken.append(int(token))
            if token in stops or len(ids) + len(taken) == budget:
                break
        if ids:
            lengths.append(len(taken))
        ids += taken
        if ids[-1] in stops:
            return ids, lengths, "stop"
        if len(ids) == budget:
            return ids, lengths, "length"
        size = min(right, block - 1) + 1
