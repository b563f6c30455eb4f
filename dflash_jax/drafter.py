"""The DFlash drafter (arXiv 2602.06036, section 3): fuse, materialize, draft. One module for
training and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.block_attention import context_block_attention
from dflash_jax.config import DrafterConfig
from dflash_jax.drafter_init import INITS, check_copyable, from_target
from dflash_jax.errors import LoadError
from dflash_jax.layers import INIT, Dtype, GatedMLP, Projection, RMSNorm, apply, linear, rms_norm
from dflash_jax.rope import apply_rope, rope_cos_sin
from dflash_jax.target import Params, Target

PerLayer = tuple[jax.Array, ...]


class StackedKV(nn.Module):
    """Key and value projections of every draft layer in one parameter, [L, K, 2, H, D]."""

    config: DrafterConfig
    dtype: Dtype

    def setup(self) -> None:
        c = self.config
        out = (c.num_key_value_heads, 2, c.head_dim)
        self.kernel = self.param("kernel", INIT, (c.num_hidden_layers, *out, c.hidden_size))
        if c.attention_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (c.num_hidden_layers, *out))

    def layer(self, x: jax.Array, index: int) -> jax.Array:
        """[..., D] -> [..., K, 2, H] of one layer."""
        kernel = self.kernel[index].astype(self.dtype)
        out = linear(x, kernel.reshape(-1, kernel.shape[-1]))
        out = out.reshape(*x.shape[:-1], *kernel.shape[:-1])
        return out + self.bias[index].astype(self.dtype) if self.config.attention_bias else out

    def all_layers(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, D] -> [B, S, L, K, 2, H], one matrix product for all layers."""
        kernel = self.kernel.astype(self.dtype)
        out = linear(x_BSD, kernel.reshape(-1, kernel.shape[-1]))
        out = out.reshape(*x_BSD.shape[:-1], *kernel.shape[:-1])
        return out + self.bias.astype(self.dtype) if self.config.attention_bias else out


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the injected context and the block."""

    config: DrafterConfig
    index: int
    dtype: Dtype

    @nn.compact
    def __call__(
        self,
        x_BAGD: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        block_k_BAGKH: jax.Array,
        block_v_BAGKH: jax.Array,
        context_k_BKSH: jax.Array,
        context_v_BKSH: jax.Array,
        anchor_positions_BA: jax.Array,
        implementation: str,
    ) -> jax.Array:
        c = self.config
        K, R, H = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, c.head_dim
        q = Projection((c.hidden_size,), (K, R, H), c.attention_bias, self.dtype, name="q")(x_BAGD)
        q = RMSNorm(H, c.rms_norm_eps, name="q_norm")(q)
        q = apply_rope(q.reshape(*q.shape[:3], K * R, H), cos, sin)
        window = c.window(self.index)
        out = context_block_attention(
            q,
            context_k_BKSH,
            context_v_BKSH,
            block_k_BAGKH,
            block_v_BAGKH,
            anchor_positions_BA,
            window=window,
            causal=window is not None and c.sliding_causal,
            implementation=implementation,
        )
        out = out.reshape(*out.shape[:3], K, R, H)
        return Projection((K, R, H), (c.hidden_size,), c.attention_bias, self.dtype, name="out")(
            out
        )


class DraftLayer(nn.Module):
    """One Qwen3-style pre-norm layer of the drafter."""

    config: DrafterConfig
    index: int
    dtype: Dtype

    def setup(self) -> None:
        c = self.config
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = DraftAttention(c, self.index, self.dtype)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, False, self.dtype)


class DFlashDrafter(nn.Module):
    """Block-diffusion drafter. Embedding and head are the target's and are not held here."""

    config: DrafterConfig
    dtype: Dtype

    def setup(self) -> None:
        c = self.config
        fused = c.hidden_size * len(c.target_layer_ids)
        self.fc = Projection((fused,), (c.hidden_size,), False, self.dtype)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.kv = StackedKV(c, self.dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, stack=(c.num_hidden_layers,))
        self.layers = [DraftLayer(c, i, self.dtype) for i in range(c.num_hidden_layers)]

    def fuse(self, features_BSM: jax.Array) -> jax.Array:
        """Concatenated taps -> context_BSD, shared by all draft layers."""
        return self.hidden_norm(self.fc(features_BSM.astype(self.dtype)))

    def materialize(
        self, context_BSD: jax.Array, positions_BS: jax.Array
    ) -> tuple[PerLayer, PerLayer]:
        """Context -> keys (normed, rotated) and values of every layer, each [B, K, S, H].

        Computed once per committed token and kept in the drafter's cache; never from draft hidden
        states.
        """
        c = self.config
        kv = self.kv.all_layers(context_BSD)
        k_BSLKH, v_BSLKH = kv[..., 0, :], kv[..., 1, :]
        cos, sin = rope_cos_sin(positions_BS, c.rope, c.head_dim)
        normed = rms_norm(k_BSLKH, self.k_norm.scale[:, None], c.rms_norm_eps)
        k_BSLKH = apply_rope(normed, cos[:, :, None, None], sin[:, :, None, None])
        layers = range(c.num_hidden_layers)
        return (
            tuple(k_BSLKH[:, :, i].swapaxes(1, 2) for i in layers),
            tuple(v_BSLKH[:, :, i].swapaxes(1, 2) for i in layers),
        )

    def draft(
        self,
        embeddings_BAGD: jax.Array,
        anchor_positions_BA: jax.Array,
        context_k: PerLayer,
        context_v: PerLayer,
        attention: str = "dense",
    ) -> jax.Array:
        """One bidirectional pass over the blocks -> hidden_BAGD after the final norm.

        Args:
          embeddings_BAGD: the target's embeddings of `[anchor, mask, ..., mask]`; A = 1 in
            decoding.
          anchor_positions_BA: slot k sits at `anchor + k` and sees context slots `< anchor`.
          context_k, context_v: from `materialize`, or the cache that holds them.
          attention: implementation of `block_attention.context_block_attention`.
        """
        c = self.config
        positions_BAG = anchor_positions_BA[..., None] + jnp.arange(embeddings_BAGD.shape[2])
        cos, sin = rope_cos_sin(positions_BAG, c.rope, c.head_dim)
        cos, sin = cos[..., None, :], sin[..., None, :]
        x = embeddings_BAGD.astype(self.dtype)
        for i, layer in enumerate(self.layers):
            h = layer.input_norm(x)
            kv = self.kv.layer(h, i)
            block_k = apply_rope(self.k_norm(kv[..., 0, :], i), cos, sin)
            x = x + layer.attention(
                h,
                cos,
                sin,
                block_k,
                kv[..., 1, :],
                context_k[i],
                context_v[i],
                anchor_positions_BA,
                attention,
            )
            x = x + layer.mlp(layer.post_norm(x))
        return self.norm(x)

    def __call__(
        self,
        features_BSM: jax.Array,
        embeddings_BAGD: jax.Array,
        anchor_positions_BA: jax.Array,
        attention: str = "dense",
    ) -> jax.Array:
        """The training forward: `draft` over context from the features of a whole sequence."""
        context = self.fuse(features_BSM)
        positions = jnp.broadcast_to(jnp.arange(context.shape[1]), context.shape[:2])
        k, v = self.materialize(context, positions)
        return self.draft(embeddings_BAGD, anchor_positions_BA, k, v, attention)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter: `config`, the Linen `model`, and `params` (plain nested dict). It needs its
    target to run."""

    config: DrafterConfig
    model: DFlashDrafter
    params: Params

    def resized(self, block_size: int) -> Drafter:
        """The same weights as a drafter of blocks of `block_size` slots, for which they were not
        trained."""
        config = dataclasses.replace(self.config, block_size=block_size)
        return dataclasses.replace(self, config=config, model=self.model.clone(config=config))


def init_drafter(
    target: Target,
    config: DrafterConfig,
    seed: int = 0,
    dtype: Dtype = jnp.float32,
    init: str = "random",
) -> Drafter:
    """A fresh drafter for `target`, to train.

    Args:
      init: "random", normal(0.02) matrices and unit norms, or "target", layers copied from the
        target (`drafter_init`).

    Raises:
      LoadError: the config does not fit the target, with both numbers.
      ValueError: no such `init`.
    """
    check_fits(config, target)
    if init not in INITS:
        raise ValueError(f"init: {init!r} is not one of {INITS}")
    source = {}
    if init == "target":
        check_copyable(config, target.config, target.name)
        source = target.params
    model = DFlashDrafter(config, jnp.dtype(dtype))

    def make(key: jax.Array, source: Params) -> Params:
        features = jnp.zeros((1, 1, config.hidden_size * len(config.target_layer_ids)), dtype)
        block = jnp.zeros((1, 1, 1, config.hidden_size), dtype)
        params = model.init(key, features, block, jnp.zeros((1, 1), jnp.int32))["params"]
        if source:
            params = from_target(params, config, source, target.config)
        return jax.tree.map(lambda p: p.astype(dtype), params)

    return Drafter(config, model, jax.jit(make)(jax.random.key(seed), source))


def check_fits(config: DrafterConfig, target: Target, source: str = "drafter config") -> None:
    """Refuses a drafter that cannot serve this target.

    Raises:
      LoadError: every mismatch, each with the field and both values.
    """
    t = target.config
    problems = [
        f"{field}: drafter {mine}, target {theirs}"
        for field, mine, theirs in (
            ("hidden_size", config.hidden_size, t.hidden_size),
            ("vocab_size", config.vocab_size, t.vocab_size),
            ("num_target_layers", config.num_target_layers, t.num_hidden_layers),
        )
        if mine != theirs
    ]
    ids = config.target_layer_ids
    if any(not 0 <= i < t.num_hidden_layers for i in ids):
        problems.append(
            f"target_layer_ids: {list(ids)} reach beyond the target's {t.num_hidden_layers} layers"
        )
    if not 0 <= config.mask_token_id < t.vocab_size:
        problems.append(
            f"mask_token_id: {config.mask_token_id} is outside the target's {t.vocab_size} "
            "embedding rows"
        )
    if config.mask_token_id in target.stop_token_ids:
        problems.append(
            f"mask_token_id: {config.mask_token_id} is one of the target's stop ids "
            f"{list(target.stop_token_ids)}"
        )
    if problems:
        raise LoadError(f"{source} does not fit target {target.name!r}: " + "; ".join(problems))


def block_embeddings(
    embed: Callable[[jax.Array], jax.Array],
    anchor_tokens_BA: jax.Array,
    block_size: int,
    mask_token_id: int,
) -> jax.Array:
    """The target's embeddings of `[anchor, mask, ..., mask]`, [B, A, G, D]."""
    tokens = jnp.full((*anchor_tokens_BA.shape, block_size), mask_token_id, jnp.int32)
    return embed(tokens.at[..., 0].set(anchor_tokens_BA))


def draft_logits(
    target: Target,
    drafter: Drafter,
    features_BSM: jax.Array,
    anchor_tokens_B: jax.Array,
    anchor_positions_B: jax.Array,
    block_size: int | None = None,
) -> jax.Array:
    """Float32 draft logits_BGV of all slots; slot 0 predicts nothing that is used.

    Row b sees `features[b, :anchor_positions[b]]`; the rest is ignored.

    Raises:
      ValueError: an anchor beyond the features, or an impossible block size.
    """
    block = block_size or drafter.config.block_size
    furthest, slots = int(np.max(anchor_positions_B)), features_BSM.shape[1]
    if block < 1 or not 0 <= int(np.min(anchor_positions_B)) <= furthest <= slots:
        raise ValueError(
            f"block_size {block} must be >= 1 and anchor_positions within 0..{slots} (features of "
            f"{slots} positions are given); the largest is {furthest}"
        )
    return _draft_logits(
        target.model,
        drafter.model,
        block,
        target.params,
        drafter.params,
        jnp.asarray(features_BSM),
        jnp.asarray(anchor_tokens_B, jnp.int32),
        jnp.asarray(anchor_positions_B, jnp.int32),
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draft_logits(
    target_model: Any,
    model: DFlashDrafter,
    block_size: int,
    target_params: Params,
    params: Params,
    features_BSM: jax.Array,
    anchor_tokens_B: jax.Array,
    anchor_positions_B: jax.Array,
) -> jax.Array:
    def embed(tokens: jax.Array) -> jax.Array:
        return apply(target_model, target_params, tokens, method="embed")

    block = block_embeddings(
        embed, anchor_tokens_B[:, None], block_size, model.config.mask_token_id
    )
    hidden = apply(model, params, features_BSM, block, anchor_positions_B[:, None])
    hidden = hidden[:, 0].astype(target_model.dtype)
    return apply(target_model, target_params, hidden, method="head")
