"""The frozen target model with the feature tap: Llama, Qwen3 and Qwen3-MoE in one Linen module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax import cache as kv
from dflash_jax.attention import attend, attend_causal_cudnn, why_not_cudnn
from dflash_jax.cache import KVCache
from dflash_jax.config import TargetConfig
from dflash_jax.layers import (
    INIT,
    Dtype,
    GatedMLP,
    MixtureOfExperts,
    Projection,
    RMSNorm,
    apply,
    logits,
)
from dflash_jax.masks import causal_mask, within_window
from dflash_jax.rope import apply_rope, rope_cos_sin

Params = Any
LayerCache = tuple[jax.Array, jax.Array]
ATTENTIONS = ("dense", "cudnn")


class TargetAttention(nn.Module):
    """Grouped-query self-attention with fused QKV, optionally per-head RMSNorm on q and k
    (Qwen3). Without a mask it is causal, by cuDNN."""

    config: TargetConfig
    dtype: Dtype

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        cos_BT1H: jax.Array,
        sin_BT1H: jax.Array,
        mask_BTS: jax.Array | None,
        cache: LayerCache | None,
        start_B: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        K, R, H = c.num_key_value_heads, c.num_groups, c.head_dim
        qkv = Projection((c.hidden_size,), (K, R + 2, H), c.attention_bias, self.dtype, name="qkv")(
            x_BTD
        )
        q_BTKRH, k_BTKH, v_BTKH = qkv[..., :R, :], qkv[..., R, :], qkv[..., R + 1, :]
        if c.qk_norm:
            q_BTKRH = RMSNorm(H, c.rms_norm_eps, name="q_norm")(q_BTKRH)
            k_BTKH = RMSNorm(H, c.rms_norm_eps, name="k_norm")(k_BTKH)
        q_BTKRH = apply_rope(q_BTKRH, cos_BT1H[..., None, :], sin_BT1H[..., None, :])
        k_BTKH = apply_rope(k_BTKH, cos_BT1H, sin_BT1H)
        k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        if cache is not None:
            assert start_B is not None
            cache = (kv.write(cache[0], k_BKTH, start_B), kv.write(cache[1], v_BKTH, start_B))
            k_BKTH, v_BKTH = cache
        if mask_BTS is None:
            out = attend_causal_cudnn(q_BTKRH, k_BKTH, v_BKTH)
        else:
            out = attend(q_BTKRH, k_BKTH, v_BKTH, mask_BTS)
        out = Projection((K, R, H), (c.hidden_size,), c.attention_bias, self.dtype, name="out")(out)
        return out, cache


class TargetLayer(nn.Module):
    """One pre-norm decoder layer."""

    config: TargetConfig
    index: int
    dtype: Dtype

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        mask_BTS: jax.Array | None,
        cache: LayerCache | None,
        start_B: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        attended, cache = TargetAttention(c, self.dtype, name="attention")(
            RMSNorm(c.hidden_size, c.rms_norm_eps, name="input_norm")(x_BTD),
            cos,
            sin,
            mask_BTS,
            cache,
            start_B,
        )
        x_BTD = x_BTD + attended
        if c.moe_layers[self.index]:
            mlp: nn.Module = MixtureOfExperts(
                c.hidden_size,
                c.moe_intermediate_size,
                c.num_experts,
                c.num_experts_per_tok,
                c.norm_topk_prob,
                self.dtype,
                name="moe",
            )
        else:
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, self.dtype, name="mlp")
        return x_BTD + mlp(RMSNorm(c.hidden_size, c.rms_norm_eps, name="post_norm")(x_BTD)), cache


class Embedding(nn.Module):
    """Token embedding; `attend` is the tied head."""

    vocab_size: int
    hidden_size: int
    dtype: Dtype

    def setup(self) -> None:
        self.embedding = self.param("embedding", INIT, (self.vocab_size, self.hidden_size))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        return logits(x, self.embedding.astype(self.dtype))


class Head(nn.Module):
    """Untied output head."""

    hidden_size: int
    vocab_size: int
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.vocab_size, self.hidden_size)
        return logits(x, self.param("kernel", INIT, shape).astype(self.dtype))


class TargetModel(nn.Module):
    """tokens, cache -> hidden, features, cache. `embed` and `head` are shared with the drafter.

    Layers are unrolled: scanning over stacked caches copies them whole at every step.
    """

    config: TargetConfig
    dtype: Dtype

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, self.dtype, name="embed")
        self.layers = [TargetLayer(c, i, self.dtype) for i in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Head(c.hidden_size, c.vocab_size, self.dtype)

    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: KVCache | None = None,
        *,
        positions_BT: jax.Array | None = None,
        mask_BTS: jax.Array | None = None,
        layer_ids: tuple[int, ...] = (),
        attention: str = "dense",
    ) -> tuple[jax.Array, jax.Array, KVCache | None]:
        """Runs the decoder over T tokens.

        Args:
          tokens_BT: int32 ids.
          cache: the new keys and values are written from `cache.length_B` on and the queries see
            the
            cache; lengths are left for the caller to commit. None: the tokens see each other only.
          positions_BT: absolute positions, by default `cache.length_B + arange(T)` (0.. without a
            cache).
          mask_BTS: True = visible, by default causal over slots; windows of sliding layers are
            applied
            on top of it.
          layer_ids: tapped layers; the feature of layer i is its output residual stream, before the
            final norm (`hidden_states[i + 1]` in Transformers' terms).
          attention: "dense", or "cudnn" for a pass without cache, positions and mask of its own;
            layers with a sliding window stay dense. See `resolve_attention`.

        Returns:
          hidden_BTD after the final norm (for `head`), features_BTM concatenated in the order of
          `layer_ids`, and the cache.

        Raises:
          ValueError: an unknown `attention`, or "cudnn" where it cannot run.
        """
        c = self.config
        if attention not in ATTENTIONS:
            raise ValueError(f"attention: {attention!r} is not one of {ATTENTIONS}")
        flash = attention == "cudnn"
        if flash and not (cache is None and positions_BT is None and mask_BTS is None):
            raise ValueError("attention: 'cudnn' takes no cache, positions_BT or mask_BTS")
        start_B = None if cache is None else cache.length_B
        if positions_BT is None:
            first = jnp.zeros((1,), jnp.int32) if start_B is None else start_B
            positions_BT = first[:, None] + jnp.arange(tokens_BT.shape[1])
        if mask_BTS is None:
            slots = tokens_BT.shape[1] if cache is None else cache.num_slots
            mask_BTS = causal_mask(positions_BT, slots)
        cos, sin = rope_cos_sin(positions_BT, c.rope, c.head_dim)
        cos, sin = cos[:, :, None], sin[:, :, None]
        x = self.embed_tokens(tokens_BT)
        taps: dict[int, jax.Array] = {}
        new_k, new_v = [], []
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else (cache.k[i], cache.v[i])
            mask = None
            if not flash or c.window(i) is not None:
                mask = within_window(mask_BTS, positions_BT, c.window(i))
            x, layer_cache = layer(x, cos, sin, mask, layer_cache, start_B)
            if layer_cache is not None:
                new_k.append(layer_cache[0])
                new_v.append(layer_cache[1])
            if i in layer_ids:
                taps[i] = x
        features = (
            jnp.concatenate([taps[i] for i in layer_ids], axis=-1)
            if layer_ids
            else jnp.zeros((*x.shape[:-1], 0), x.dtype)
        )
        if cache is not None:
            cache = dataclasses.replace(cache, k=tuple(new_k), v=tuple(new_v))
        hidden = self.norm(x)
        if self.is_initializing():
            self.head(hidden)
        return hidden, features, cache

    def embed(self, tokens: jax.Array) -> jax.Array:
        """ids [...] -> embeddings [..., D]."""
        return self.embed_tokens(tokens)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Normed hidden states [..., D] -> float32 logits [..., V]."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden)
        return self.lm_head(hidden)

    def init_cache(self, batch: int, num_slots: int) -> KVCache:
        """An empty cache that fits this model."""
        c = self.config
        return kv.init_cache(
            c.num_hidden_layers, batch, num_slots, c.num_key_value_heads, c.head_dim, self.dtype
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """A frozen target.

    Attributes:
      config: architecture.
      model: the Linen module; `model.apply({"params": params}, ...)` is a pure function.
      params: plain nested dict of arrays.
      tokenizer: a Transformers tokenizer, where the files have one.
      stop_token_ids: the end-of-sequence ids stated in the target's own files.
      name: what it was loaded from, for messages and records.
    """

    config: TargetConfig
    model: TargetModel
    params: Params
    tokenizer: Any = None
    stop_token_ids: tuple[int, ...] = ()
    name: str = ""


def init_target(
    config: TargetConfig, *, seed: int = 0, dtype: Dtype = jnp.float32, name: str = "random"
) -> Target:
    """A target with random weights: for tests, the `tiny` config and cost measurements."""
    model = TargetModel(config, jnp.dtype(dtype))

    def init(key: jax.Array) -> Params:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return jax.tree.map(lambda p: p.astype(dtype), params)

    return Target(config, model, jax.jit(init)(jax.random.key(seed)), name=name)


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The tapped layers as a tuple.

    Raises:
      ValueError: an id out of range or twice, with the field and the number of layers.
    """
    ids = tuple(int(i) for i in layer_ids)
    if any(not 0 <= i < num_layers for i in ids) or len(set(ids)) != len(ids):
        raise ValueError(
            f"target_layer_ids: {list(ids)} must be distinct and in 0..{num_layers - 1} "
            f"(the target has {num_layers} layers)"
        )
    return ids


def resolve_attention(name: str, model: TargetModel, devices: Sequence[jax.Device]) -> str:
    """The attention of uncached passes on these devices.

    Args:
      name: one of `ATTENTIONS`, or "auto": "cudnn" where it runs, "dense" elsewhere.

    Raises:
      ValueError: an unknown name, or "cudnn" by name where it cannot run, with the reason.
    """
    if name not in ("auto", *ATTENTIONS):
        raise ValueError(f"{name!r} is not one of {('auto', *ATTENTIONS)}")
    if name == "dense":
        return name
    reason = why_not_cudnn(devices[0], model.dtype, model.config.head_dim)
    if reason is not None and name == "cudnn":
        raise ValueError(f"'cudnn' {reason}")
    return "cudnn" if reason is None else "dense"


def target_forward(
    target: Target,
    tokens_BT: jax.Array,
    layer_ids: Sequence[int] = (),
    attention: str = "dense",
) -> tuple[jax.Array, jax.Array]:
    """One uncached pass: float32 logits_BTV and features_BTM (M = taps * D, `layer_ids` order).

    `attention`: "auto", "dense" or "cudnn", see `resolve_attention`.
    """
    ids = check_layer_ids(layer_ids, target.config.num_hidden_layers)
    attention = resolve_attention(attention, target.model, jax.devices())
    tokens_BT = jnp.asarray(tokens_BT, jnp.int32)
    return _forward(target.model, target.params, tokens_BT, ids, attention)


@partial(jax.jit, static_argnames=("model", "layer_ids", "attention"))
def _forward(
    model: TargetModel,
    params: Params,
    tokens_BT: jax.Array,
    layer_ids: tuple[int, ...],
    attention: str,
) -> tuple[jax.Array, jax.Array]:
    hidden, features, _ = apply(model, params, tokens_BT, layer_ids=layer_ids, attention=attention)
    return apply(model, params, hidden, method="head"), features
