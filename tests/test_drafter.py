"""The drafter against a plain NumPy loop; visibility by gradient; windows; one module, two uses."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.config import DrafterConfig, RopeConfig
from dflash_jax.decode import BoundTarget
from dflash_jax.drafter import Drafter, block_embeddings, draft_logits, init_drafter
from dflash_jax.layers import apply
from dflash_jax.masks import block_masks
from dflash_jax.rope import rope_cos_sin
from tests.rigs import BLOCK, TAPS, tiny_drafter, tiny_target

SLOTS, WINDOW = 14, 5
FEATURES = 32 * len(TAPS)


def features_of(batch: int = 1, slots: int = SLOTS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, slots, FEATURES)).astype(np.float32)


# A plain loop, slot by slot and head by head, in float64


def norm(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * np.asarray(scale)


def rotate(x: np.ndarray, position: int, config: DrafterConfig) -> np.ndarray:
    cos, sin = rope_cos_sin(jnp.array([position]), config.rope, config.head_dim)  # tested apart
    half = config.head_dim // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * np.asarray(cos, np.float64)[0] + turned * np.asarray(sin, np.float64)[0]


def numpy_draft(drafter: Drafter, features: np.ndarray, block: np.ndarray, anchor: int):
    """Hidden states [G, D] of one block; features [S, M], block embeddings [G, D]."""
    c = drafter.config
    p: Any = jax.tree.map(lambda a: np.asarray(a, np.float64), drafter.params)
    K, R, H = c.num_key_value_heads, c.num_groups, c.head_dim
    context = norm(features @ p["fc"]["kernel"].T, p["hidden_norm"]["scale"], c.rms_norm_eps)

    def key_value(x: np.ndarray, layer: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        kv = np.einsum("...d,d->...", p["kv"]["kernel"][layer], x)
        if c.attention_bias:
            kv = kv + p["kv"]["bias"][layer]
        key = norm(kv[:, 0], p["k_norm"]["scale"][layer], c.rms_norm_eps)
        return rotate(key, position, c), kv[:, 1]

    x = block.astype(np.float64)
    for i in range(c.num_hidden_layers):
        layer, window = p[f"layers_{i}"], c.window(i)
        h = norm(x, layer["input_norm"]["scale"], c.rms_norm_eps)
        seen = [(j, *key_value(context[j], i, j)) for j in range(anchor)]
        own = [(anchor + k, *key_value(h[k], i, anchor + k)) for k in range(len(x))]
        attended = np.zeros_like(x)
        for k in range(len(x)):
            attention = layer["attention"]
            q = np.einsum("krhd,d->krh", attention["q"]["kernel"], h[k])
            if c.attention_bias:
                q = q + attention["q"]["bias"]
            q = rotate(norm(q, attention["q_norm"]["scale"], c.rms_norm_eps), anchor + k, c)
            visible = [e for e in seen if window is None or e[0] >= anchor + k - (window - 1)]
            causal = window is not None and c.sliding_causal
            visible += own[: k + 1] if causal else own
            heads = np.zeros((K, R, H))
            for n in range(K):
                for r in range(R):
                    scores = np.array([q[n, r] @ key[n] for _, key, _ in visible]) / np.sqrt(H)
                    weights = np.exp(scores - scores.max())
                    values = np.stack([value[n] for _, _, value in visible])
                    heads[n, r] = weights / weights.sum() @ values
            attended[k] = np.einsum("dkrh,krh->d", attention["out"]["kernel"], heads)
            if c.attention_bias:
                attended[k] += attention["out"]["bias"]
        x = x + attended
        h = norm(x, layer["post_norm"]["scale"], c.rms_norm_eps)
        gate, up = np.einsum("cfd,gd->cgf", layer["mlp"]["gate_up"]["kernel"], h)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["kernel"].T
    return norm(x, p["norm"]["scale"], c.rms_norm_eps)


YARN = RopeConfig(1e4, "yarn", 8.0, original_max_position_embeddings=64)
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": WINDOW}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases_and_yarn": {"attention_bias": True, "rope": YARN},
    "sliding": SLIDING,
    "sliding_bidirectional": {**SLIDING, "sliding_causal": False},
    "one_kv_head": {"num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 20},
}


def perturbed(drafter: Drafter, seed: int = 0) -> Drafter:
    """Norms and biases moved off 1 and 0, which would hide mistakes."""
    rng = np.random.default_rng(seed)

    def move(path: Any, p: jax.Array) -> jax.Array:
        noise = rng.normal(size=p.shape).astype(np.float32)
        return p + 0.3 * noise if {"scale", "bias"} & {key.key for key in path} else p

    params = jax.tree_util.tree_map_with_path(move, drafter.params)
    return Drafter(drafter.config, drafter.model, params)


@partial(jax.jit, static_argnums=(0, 1))
def hidden_of(target_model, model, target_params, params, features, block_ids, anchors):
    block = BoundTarget(target_model, target_params).embed(block_ids)
    return apply(model, params, features, block, anchors), block


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_plain_loop(variant: str) -> None:
    """Several anchors of a row at once (the training forward), 0 and the end among them."""
    target, drafter = tiny_target(), perturbed(tiny_drafter(**VARIANTS[variant]))
    features = features_of()
    anchors = np.array([[0, 1, 7, SLOTS]])
    ids = np.random.default_rng(1).integers(0, 127, (1, 4, BLOCK))
    hidden, block = hidden_of(
        target.model, drafter.model, target.params, drafter.params, features, ids, anchors
    )
    for a, anchor in enumerate(anchors[0]):
        wanted = numpy_draft(drafter, features[0], np.asarray(block)[0, a], int(anchor))
        np.testing.assert_allclose(hidden[0, a], wanted, atol=1e-4, rtol=0)


def test_training_forward_equals_decode_forward() -> None:
    """All anchors of a sequence in one pass, and one by one through `draft_logits`."""
    target, drafter = tiny_target(), tiny_drafter()
    features = features_of(batch=1, slots=16)
    anchors = np.array([[0, 3, 4, 11, 16]])
    tokens = np.array([[1, 2, 3, 4, 5]])
    ids = np.full((1, 5, BLOCK), drafter.config.mask_token_id)
    ids[..., 0] = tokens
    hidden, _ = hidden_of(
        target.model, drafter.model, target.params, drafter.params, features, ids, anchors
    )
    logits = np.asarray(BoundTarget(target.model, target.params).head(hidden))
    single = draft_logits(target, drafter, np.repeat(features, 5, 0), tokens[0], anchors[0])
    np.testing.assert_allclose(single, logits[0], atol=1e-4, rtol=0)


# Visibility by gradient


@partial(jax.jit, static_argnums=0)
def jacobians(model, params, features, block, anchors):
    def outputs(features: jax.Array, block: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(apply(model, params, features, block, anchors)), -1)[0, 0]

    return jax.jacrev(outputs, argnums=(0, 1))(features, block)


def reach(drafter: Drafter, anchor: int) -> tuple[np.ndarray, np.ndarray]:
    """[G, S] and [G, G]: True where slot k's output depends on a feature, a block embedding."""
    features, block = features_of(), features_of(1, BLOCK, 5)[:, None, :, :32]
    by_feature, by_slot = jacobians(
        drafter.model, drafter.params, features, block, np.array([[anchor]])
    )
    return (
        np.abs(np.asarray(by_feature)[:, 0]).max(-1) > 0,
        np.abs(np.asarray(by_slot)[:, 0, 0]).max(-1) > 0,
    )


@pytest.mark.parametrize("anchor", [0, 1, 6, SLOTS])
def test_a_block_sees_features_below_its_anchor_and_all_of_itself(anchor: int) -> None:
    """Changing the feature at p moves only blocks with anchor > p."""
    features, block = reach(tiny_drafter(), anchor)
    below = np.broadcast_to(np.arange(SLOTS) < anchor, (BLOCK, SLOTS))
    np.testing.assert_array_equal(features, below)
    assert block.all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_sliding_layer_sees_its_window(causal: bool) -> None:
    """Features at distance W-1 from slot k count, at W and W+1 not; its block only by causality."""
    drafter = tiny_drafter(
        num_layers=1,
        layer_types=("sliding_attention",),
        sliding_window=WINDOW,
        sliding_causal=causal,
    )
    anchor = 9
    features, block = reach(drafter, anchor)
    for k in range(BLOCK):
        for at in range(SLOTS):
            distance = anchor + k - at
            assert features[k, at] == (at < anchor and distance <= WINDOW - 1), (k, distance)
    whole = np.ones((BLOCK, BLOCK), bool)
    np.testing.assert_array_equal(block, np.tril(whole) if causal else whole)


def test_a_full_layer_beside_a_sliding_one_sees_everything() -> None:
    features, block = reach(tiny_drafter(**SLIDING), 9)
    assert (features == (np.arange(SLOTS) < 9)).all()
    assert block.all()


def test_window_off_with_a_number_present() -> None:
    config = tiny_drafter(**SLIDING).config.to_hf()
    config |= {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    off = DrafterConfig.from_hf(config)
    assert [off.window(i) for i in range(2)] == [None, None]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.integers(1, 6),
    st.none() | st.integers(1, 9),
    st.booleans(),
)
def test_block_masks_equal_brute_force(anchors, block, window, causal) -> None:
    masks = block_masks(np.array([anchors]), block, 10, window=window, causal=causal)
    context, own = (np.asarray(mask) for mask in masks)
    assert own.shape == (block, block)
    assert context.shape == (1, len(anchors), block, 10)
    for a, anchor in enumerate(anchors):
        for k in range(block):
            for j in range(10):
                seen = j < anchor and (window is None or j >= anchor + k - (window - 1))
                assert context[0, a, k, j] == seen
    for k in range(block):
        for j in range(block):
            assert own[k, j] == (not causal or j <= k)


# The public function


def test_draft_logits_ignore_features_from_the_anchor_on() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    features = features_of(batch=2)
    garbage, context = features.copy(), features.copy()
    garbage[0, 4:], garbage[1, 9:] = -1e30, 1e30
    context[:, 3] += 1
    tokens, anchors = np.array([5, 6]), np.array([4, 9])
    wanted = np.asarray(draft_logits(target, drafter, features, tokens, anchors))
    np.testing.assert_array_equal(draft_logits(target, drafter, garbage, tokens, anchors), wanted)
    other = np.asarray(draft_logits(target, drafter, context, tokens, anchors))
    assert (np.abs(other - wanted).max((1, 2)) > 1e-3).all()


def test_draft_logits_of_a_row_do_not_depend_on_its_neighbours() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    features = features_of(batch=3)
    tokens, anchors = np.array([5, 6, 7]), np.array([4, 9, 0])
    together = draft_logits(target, drafter, features, tokens, anchors)
    for row in range(3):
        pick = slice(row, row + 1)
        alone = draft_logits(
            target, drafter, jnp.asarray(features[pick]), tokens[pick], anchors[pick]
        )
        np.testing.assert_allclose(alone[0], together[row], atol=1e-5)


def test_the_mask_token_and_the_anchor_fill_the_block() -> None:
    target = tiny_target()
    bound = BoundTarget(target.model, target.params)
    block = block_embeddings(bound.embed, jnp.array([[3, 4]]), 4, 127)
    table = np.asarray(target.params["embed"]["embedding"])
    np.testing.assert_array_equal(block[0], table[[[3, 127, 127, 127], [4, 127, 127, 127]]])


def test_block_size_of_draft_logits() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    for size, slots in ((None, BLOCK), (3, 3), (1, 1)):
        logits = draft_logits(target, drafter, features_of(), [5], [4], block_size=size)
        assert logits.shape == (1, slots, 128)
        assert logits.dtype == jnp.float32


@pytest.mark.parametrize(("anchor", "block_size"), [(SLOTS + 1, None), (-1, None), (4, -2)])
def test_impossible_anchors_and_blocks_are_refused(anchor: int, block_size: int | None) -> None:
    with pytest.raises(ValueError, match=rf"block_size .* 0\.\.{SLOTS}"):
        draft_logits(tiny_target(), tiny_drafter(), features_of(), [5], [anchor], block_size)


def test_initialisation() -> None:
    """Shapes of the published layout, unit norms, no embedding or head, seeds that matter."""
    target, config = tiny_target(), tiny_drafter().config
    a, b, c = (init_drafter(target, config, seed=seed).params for seed in (0, 0, 1))
    assert set(a) == {"fc", "hidden_norm", "norm", "kv", "k_norm", "layers_0", "layers_1"}
    assert a["kv"]["kernel"].shape == (2, 2, 2, 8, 32)
    for leaf_a, leaf_b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(leaf_a, leaf_b)
    assert (np.asarray(a["fc"]["kernel"]) != np.asarray(c["fc"]["kernel"])).any()
    assert 0.01 < float(np.std(a["fc"]["kernel"])) < 0.03
    assert (np.asarray(a["norm"]["scale"]) == 1).all()
