"""The target: against Transformers, its taps, causality and windows by gradient, experts."""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from dflash_jax.cache import commit
from dflash_jax.config import TargetConfig
from dflash_jax.layers import MixtureOfExperts, apply
from dflash_jax.loading import load_target
from dflash_jax.masks import causal_mask, within_window
from dflash_jax.target import Target, TargetModel, init_target, target_forward
from tests.rigs import tiny_target

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "dtype": "float32",
}
WINDOW = 4
REFERENCES = {
    "llama_biased": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama_tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen3_sliding": lambda: Qwen3Config(
        **COMMON,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_window_off": lambda: Qwen3Config(
        **COMMON, use_sliding_window=False, sliding_window=WINDOW
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    """Saved by Transformers, loaded here: logits and every layer's output, 1e-4 in float32."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(REFERENCES[case]()).float().eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide mistakes
        for parameter in reference.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "num_local_experts" in config:  # Transformers 5 renames what the published files call so
        config["num_experts"] = config.pop("num_local_experts")
        (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 11))
    with torch.no_grad():
        out = reference(torch.tensor(tokens), output_hidden_states=True)
    layers = [2, 0, 1]  # the order of the list, not of the layers
    logits, features = target_forward(target, tokens, layers)
    np.testing.assert_allclose(logits, out.logits.numpy(), atol=1e-4, rtol=0)
    taps = np.split(np.asarray(features), 3, axis=-1)
    for layer, tap in zip(layers, taps, strict=True):
        if layer < 2:  # the last entry of hidden_states is after the final norm
            theirs = out.hidden_states[layer + 1].numpy()
            np.testing.assert_allclose(tap, theirs, atol=1e-4, rtol=0)
    normed = reference.model.norm(torch.tensor(taps[0])).detach().numpy()
    np.testing.assert_allclose(normed, out.hidden_states[3].numpy(), atol=1e-4, rtol=0)


# Taps


@cache
def adding_target() -> Target:
    """Layer i adds 10**i to every channel and nothing else, whatever the tokens."""
    config = TargetConfig.tiny("llama", num_hidden_layers=4, mlp_bias=True)
    target = init_target(config)
    params = jax.tree.map(jnp.asarray, target.params)
    for i in range(4):
        layer = params[f"layers_{i}"]
        layer["attention"]["out"]["kernel"] *= 0
        layer["mlp"]["down"]["kernel"] *= 0
        layer["mlp"]["down"]["bias"] = jnp.full((config.hidden_size,), 10.0**i)
    return dataclasses.replace(target, params=params)


@pytest.mark.parametrize("layer_ids", [(0,), (1,), (3,), (3, 0, 2)])
def test_taps_are_outputs_of_their_layers_before_the_final_norm(layer_ids) -> None:
    target = adding_target()
    tokens = np.arange(5)[None]
    _, features = target_forward(target, tokens, layer_ids)
    embedded = np.asarray(apply(target.model, target.params, tokens, method="embed"))
    assert features.shape == (1, 5, 32 * len(layer_ids))
    for layer, tap in zip(
        layer_ids, np.split(np.asarray(features), len(layer_ids), -1), strict=True
    ):
        added = sum(10.0**i for i in range(layer + 1))
        np.testing.assert_allclose(tap, embedded + added, rtol=1e-6)


@pytest.mark.parametrize("layer_ids", [(4,), (-1,), (1, 1)])
def test_taps_out_of_range_or_twice_are_refused(layer_ids) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids: .* 0\.\.3"):
        target_forward(adding_target(), np.arange(5)[None], layer_ids)


def test_no_taps_no_features() -> None:
    assert target_forward(adding_target(), np.arange(5)[None])[1].shape == (1, 5, 0)


# Causality and windows


def reach(target: Target, length: int) -> np.ndarray:
    """[T, S] True where the logits at t depend on the embedding of token s (tokens distinct)."""
    tokens = jnp.arange(length)[None]

    def logits(embedding: jax.Array) -> jax.Array:
        params = {**target.params, "embed": {"embedding": embedding}}
        hidden, _, _ = apply(target.model, params, tokens)
        return apply(target.model, params, hidden, method="head")[0]

    table = target.params["embed"]["embedding"]
    jacobian = jax.jit(jax.jacrev(lambda e: jnp.sum(jnp.sin(logits(e)), -1)))(table)
    return np.abs(np.asarray(jacobian)[:, :length]).max(-1) > 0


def test_causal_by_gradient() -> None:
    target = tiny_target()
    np.testing.assert_array_equal(reach(target, 9), np.tri(9, dtype=bool))


@pytest.mark.parametrize("window", [1, 3, 6])
def test_a_sliding_layer_sees_its_window_by_gradient(window: int) -> None:
    """Distances 0..W-1 change a query's logits, W does not."""
    target = tiny_target(
        num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=window
    )
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    np.testing.assert_array_equal(reach(target, 9), (distance >= 0) & (distance < window))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=2, max_size=2),
    st.none() | st.integers(1, 9),
)
def test_masks_equal_brute_force(positions, window) -> None:
    array = np.array(positions)
    mask = np.asarray(within_window(causal_mask(array, 10), array, window))
    for (row, i), position in np.ndenumerate(array):
        for slot in range(10):
            seen = slot <= position and (window is None or position - slot < window)
            assert mask[row, i, slot] == seen


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_cached_chunks_equal_one_pass(kind: str) -> None:
    """Rows at different offsets, stale entries beyond their lengths."""
    options: dict[str, Any] = {}
    if kind == "sliding":
        options = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
    target = tiny_target(**options)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 127, (2, 12))
    _, wanted = target_forward(target, tokens, (0, 1))
    step = jax.jit(partial(apply, target.model, layer_ids=(0, 1)))
    cache = target.model.init_cache(2, 16)
    starts = np.array([0, 0])
    for keep in ([4, 2], [1, 4], [3, 3], [0, 1]):  # tokens of each chunk of 4 that stay
        index = starts[:, None] + np.arange(4)
        chunk = np.take_along_axis(tokens, np.minimum(index, 11), axis=1)
        rejected = np.arange(4)[None] >= np.array(keep)[:, None]
        chunk = np.where(rejected, 126 - chunk, chunk)
        _, features, cache = step(target.params, chunk, cache)
        for row in range(2):
            mine = np.asarray(features)[row, : keep[row]]
            theirs = np.asarray(wanted)[row, starts[row] : starts[row] + keep[row]]
            np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=0)
        starts = starts + keep
        cache = commit(cache, jnp.asarray(starts))


# Mixture of experts

EXPERTS, TOP, WIDTH, INNER = 6, 2, 8, 5


@cache
def experts(normalise: bool) -> tuple[MixtureOfExperts, Any]:
    module = MixtureOfExperts(WIDTH, INNER, EXPERTS, TOP, normalise, jnp.float32)
    params = module.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return module, jax.tree.map(lambda p: p * 40, params)


def numpy_experts(x: np.ndarray, tensors: dict[str, np.ndarray], normalise: bool) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        scores = tensors["router"] @ row
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:TOP]
        weights = probs[chosen] / (probs[chosen].sum() if normalise else 1)
        for e, weight in zip(chosen, weights, strict=True):
            gate, up = tensors["gate_up"][e] @ row
            out[t] += weight * tensors["down"][e] @ (gate / (1 + np.exp(-gate)) * up)
    return out


def as_numpy(params: Any) -> dict[str, np.ndarray]:
    """Router [E, D], gate and up [E, 2, F, D], down [E, D, F], in float64."""
    arrays = {
        "router": np.asarray(params["router"]["kernel"], np.float64),
        "gate_up": np.asarray(params["gate_up"], np.float64),
        "down": np.asarray(params["down"], np.float64),
    }
    assert arrays["router"].shape == (EXPERTS, WIDTH)
    assert arrays["gate_up"].shape == (EXPERTS, 2, INNER, WIDTH)
    assert arrays["down"].shape == (EXPERTS, WIDTH, INNER)
    return arrays


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_experts_equal_a_loop(rows: int, normalise: bool) -> None:
    module, params = experts(normalise)
    x = np.random.default_rng(rows).normal(size=(rows, WIDTH)).astype(np.float32)
    got = apply(module, params, x)
    wanted = numpy_experts(x.astype(np.float64), as_numpy(params), normalise)
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


def test_an_expert_nobody_chose_and_one_that_all_chose() -> None:
    module, params = experts(True)
    kernel = np.zeros((EXPERTS, WIDTH), np.float32)
    kernel[2], kernel[4] = 5.0, 3.0
    params = {**params, "router": {"kernel": kernel}}
    x = np.abs(np.random.default_rng(0).normal(size=(9, WIDTH))).astype(np.float32)
    wanted = numpy_experts(x.astype(np.float64), as_numpy(params), True)
    np.testing.assert_allclose(apply(module, params, x), wanted, atol=1e-4, rtol=0)


def test_a_row_of_experts_does_not_depend_on_its_neighbours() -> None:
    """Exactly: neighbours only move a row among the sorted groups."""
    module, params = experts(True)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 4, WIDTH)).astype(np.float32)
    run = jax.jit(partial(apply, module))
    whole = np.asarray(run(params, x))
    order = rng.permutation(5)
    np.testing.assert_array_equal(np.asarray(run(params, x[order])), whole[order])
    other = x.copy()
    other[1:] = rng.normal(size=other[1:].shape)
    np.testing.assert_array_equal(np.asarray(run(params, other))[0], whole[0])
    np.testing.assert_allclose(np.asarray(run(params, x[:1]))[0], whole[0], atol=1e-6)


def test_model_is_static_and_hashable() -> None:
    config = TargetConfig.tiny()
    a, b = TargetModel(config, jnp.dtype("float32")), TargetModel(config, jnp.dtype("float32"))
    assert a == b
    assert hash(a) == hash(b)
