"""A drafter that starts from the target's layers: what is copied, and what does not fit."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter, init_drafter
from dflash_jax.drafter_init import source_layers
from dflash_jax.errors import LoadError
from dflash_jax.layers import apply
from dflash_jax.target import Target, TargetModel

TARGETS = {
    "llama": TargetConfig.tiny("llama"),
    "llama, biases": TargetConfig.tiny("llama", attention_bias=True),
    "qwen3": TargetConfig.tiny("qwen3", tie_word_embeddings=True),
}


def make_target(config: TargetConfig) -> Target:
    """Random weights with norms and biases that are not one and zero."""
    rng = np.random.default_rng(0)
    model = TargetModel(config, jnp.dtype("float32"))

    def draw(path: Any, x: jax.Array) -> jax.Array:
        mean, deviation = (1.0, 0.3) if path[-1].key == "scale" else (0.0, 0.15)
        return jnp.asarray(rng.normal(mean, deviation, x.shape), x.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return Target(config, model, jax.tree_util.tree_map_with_path(draw, shapes["params"]))


def config_for(target: Target, **changes: Any) -> DrafterConfig:
    options = {"mask_token_id": 39, "num_layers": 2, "target_layer_ids": (2, 0), "block_size": 4}
    return DrafterConfig.for_target(target.config, **{**options, **changes})


@cache
def make_models(name: str) -> tuple[Target, Drafter]:
    target = make_target(TARGETS[name])
    return target, init_drafter(target, config_for(target), init="target")


@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_layer_reads_the_context_as_its_source_does(name: str) -> None:
    """Where the context is the source layer's input, keys point where the target's own do (equal
    them, where it norms them too), and values are equal."""
    target, drafter = make_models(name)
    config = target.config
    tokens = np.random.default_rng(1).integers(0, 39, (2, 9))
    run = jax.jit(partial(apply, target.model), static_argnames=("layer_ids", "method"))
    materialize = jax.jit(partial(apply, drafter.model, method="materialize"))
    for i, layer in enumerate(source_layers(drafter.config)):
        empty = target.model.init_cache(2, 9)
        inputs = (layer - 1,) if layer else ()
        _, features, cache = run(target.params, tokens, empty, layer_ids=inputs)
        if not layer:
            features = run(target.params, tokens, method="embed")
        variance = np.mean(np.square(features), axis=-1, keepdims=True)
        context = features / np.sqrt(variance + config.rms_norm_eps)
        positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
        keys, values = materialize(drafter.params, context, positions)
        np.testing.assert_allclose(values[i], cache.v[layer], atol=1e-5, rtol=1e-4)
        key, want = (np.asarray(x, np.float64) for x in (keys[i], cache.k[layer]))
        if not config.qk_norm:
            lengths = np.linalg.norm(key, axis=-1), np.linalg.norm(want, axis=-1)
            assert 0.5 < np.mean(lengths[0]) / np.mean(lengths[1]) < 2
            key, want = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (key, want))
        np.testing.assert_allclose(key, want, atol=1e-5, rtol=1e-4)


def test_the_context_starts_as_the_last_tap() -> None:
    """That of layer 2, which comes first in the list."""
    _, drafter = make_models("qwen3")
    features = np.random.default_rng(0).normal(size=(1, 3, 64)).astype(np.float32)
    context = apply(drafter.model, drafter.params, features, method="fuse")
    want = features[..., :32] / np.sqrt(np.mean(features[..., :32] ** 2, axis=-1, keepdims=True))
    np.testing.assert_allclose(context, want, rtol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_copied(name: str) -> None:
    target, drafter = make_models(name)
    new: Any = drafter.params
    fresh = jax.eval_shape(lambda: init_drafter(target, drafter.config).params)
    shapes = [jax.tree.map(lambda p: (p.shape, p.dtype), tree) for tree in (new, fresh)]
    assert shapes[0] == shapes[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
    for i, layer in enumerate(source_layers(drafter.config)):
        old = target.params[f"layers_{layer}"]
        for part in ("gate_up", "down"):
            np.testing.assert_array_equal(
                new[f"layers_{i}"]["mlp"][part]["kernel"], old["mlp"][part]["kernel"]
            )
        np.testing.assert_array_equal(
            new[f"layers_{i}"]["attention"]["out"]["kernel"], old["attention"]["out"]["kernel"]
        )
        if target.config.qk_norm:
            np.testing.assert_array_equal(
                new[f"layers_{i}"]["attention"]["q_norm"]["scale"],
                old["attention"]["q_norm"]["scale"],
            )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TargetConfig.tiny("qwen3_moe"), {}, "layer . of the target is a mixture of experts"),
        (TargetConfig.tiny("llama", mlp_bias=True), {}, "mlp_bias: the target's MLP has biases"),
        (TARGETS["llama, biases"], {"attention_bias": False}, "attention_bias: drafter False"),
        (TARGETS["llama"], {"intermediate_size": 40}, "intermediate_size: drafter 40, target 48"),
        (TARGETS["llama"], {"num_key_value_heads": 1}, "num_key_value_heads: drafter 1, target 2"),
        (TARGETS["llama"], {"num_layers": 5}, "num_hidden_layers: drafter 5, target 4"),
    ],
)
def test_what_does_not_fit(config: TargetConfig, changes: dict[str, Any], message: str) -> None:
    target = Target(config, TargetModel(config, jnp.dtype("float32")), {})
    with pytest.raises(LoadError, match=message):
        init_drafter(target, config_for(target, **changes), init="target")


def test_no_such_init() -> None:
    target, drafter = make_models("qwen3")
    with pytest.raises(ValueError, match="init: 'zeros' is not one of"):
        init_drafter(target, drafter.config, init="zeros")
