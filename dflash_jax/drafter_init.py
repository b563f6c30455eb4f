"""Where a fresh drafter starts: from noise, or from the target's own layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import LoadError

Params = Any
INITS = ("random", "target")


def source_layers(config: DrafterConfig) -> tuple[int, ...]:
    """The target layers that the draft layers are copied from: the last ones, in order."""
    n, total = config.num_hidden_layers, config.num_target_layers
    return tuple(range(total - n, total))


def check_copyable(config: DrafterConfig, target: TargetConfig, source: str) -> None:
    """Refuses a drafter whose layers cannot hold those of the target.

    Raises:
      LoadError: every mismatch, each with the field and both values.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    problems = [
        f"{name}: drafter {getattr(config, name)}, target {getattr(target, name)}"
        for name in names
        if getattr(config, name) != getattr(target, name)
    ]
    if config.num_hidden_layers > target.num_hidden_layers:
        problems.append(
            f"num_hidden_layers: drafter {config.num_hidden_layers}, target "
            f"{target.num_hidden_layers}"
        )
    else:
        problems += [
            f"layer {i} of the target is a mixture of experts, the drafter's are dense"
            for i in source_layers(config)
            if target.moe_layers[i]
        ]
    if target.attention_bias and not config.attention_bias:
        problems.append("attention_bias: drafter False, target True")
    if target.mlp_bias:
        problems.append("mlp_bias: the target's MLP has biases, a drafter's has none")
    if problems:
        raise LoadError(
            f"init 'target': the layers of {source!r} do not fit the drafter (init 'random' needs "
            "no fit): " + "; ".join(problems)
        )


def from_target(
    params: Params, config: DrafterConfig, target_params: Params, target_config: TargetConfig
) -> Params:
    """Puts the target's layers into freshly drawn drafter parameters.

    Args:
      params: from `DFlashDrafter.init`; what the target has no counterpart of stays.
    """
    new = dict(params)
    sources = [target_params[f"layers_{i}"] for i in source_layers(config)]
    groups = target_config.num_groups
    kv: dict[str, list[jax.Array]] = {}
    k_scales = []
    for i, source in enumerate(sources):
        layer = new[f"layers_{i}"]
        qkv, gain = source["attention"]["qkv"], source["input_norm"]["scale"]
        # The context has one norm for all layers: each layer's own goes into its q, k and v.
        parts = {"kernel": qkv["kernel"].astype(jnp.float32) * gain.astype(jnp.float32)}
        if "bias" in qkv:
            parts["bias"] = qkv["bias"]
        q = {name: part[:, :groups] for name, part in parts.items()}
        for name, part in parts.items():
            kv.setdefault(name, []).append(part[:, groups:])
        if target_config.qk_norm:
            q_scale = source["attention"]["q_norm"]["scale"]
            k_scale = source["attention"]["k_norm"]["scale"]
        else:
            q_scale = jnp.full(config.head_dim, _rms(q))
            k_scale = jnp.full(config.head_dim, _rms({n: p[-1][:, 0] for n, p in kv.items()}))
        k_scales.append(k_scale)
        new[f"layers_{i}"] = {
            "input_norm": {"scale": jnp.ones_like(gain)},
            "attention": {
                "q": layer["attention"]["q"] | q,
                "q_norm": {"scale": q_scale},
                "out": layer["attention"]["out"] | source["attention"]["out"],
            },
            "post_norm": source["post_norm"],
            "mlp": source["mlp"],
        }
    new["kv"] = new["kv"] | {name: jnp.stack(part) for name, part in kv.items()}
    new["k_norm"] = {"scale": jnp.stack(k_scales)}
    new["norm"] = target_params["norm"]
    # The context starts as the last tap, which is closest to what the source layers read.
    width, last = config.hidden_size, int(np.argmax(config.target_layer_ids))
    fc = jnp.zeros((width, len(config.target_layer_ids), width)).at[:, last].set(jnp.eye(width))
    new["fc"] = {"kernel": fc.reshape(width, -1)}
    return new


def _rms(projection: dict[str, jax.Array]) -> jax.Array:
    """RMS of a projection's output for inputs of independent entries with unit variance."""
    variance = jnp.sum(jnp.square(projection["kernel"].astype(jnp.float32)), axis=-1)
    if "bias" in projection:
        variance += jnp.square(projection["bias"].astype(jnp.float32))
    return jnp.sqrt(jnp.mean(variance))
