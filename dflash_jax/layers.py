"""Linen layers shared by the target and the drafter. Parameters are cast to `dtype` where they are
used."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.attention import FEW_ROWS

Dtype = Any
INIT = nn.initializers.normal(0.02)


def apply(model: nn.Module, params: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.apply` on a plain parameter tree."""
    return model.apply({"params": params}, *args, **kwargs)


def linear(x: jax.Array, kernel: jax.Array, dtype: Dtype = None) -> jax.Array:
    """`x [..., in] -> [..., out]` with a [out, in] kernel, in `dtype`, by default that of `x`.

    XLA's CPU backend multiplies a wide kernel by a few rows twice as fast with the kernel on the
    left (16 rows of SmolLM2-135M: 40 against 80 ms); the barrier keeps the compiler from turning
    the product round again. Beyond `FEW_ROWS` rows the difference fades.
    """

    def rows_first(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum("ni,oi->no", rows, kernel, preferred_element_type=dtype)

    def kernel_first(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        out = jnp.einsum("oi,ni->on", kernel, rows, preferred_element_type=dtype)
        return jax.lax.optimization_barrier(out).T

    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > FEW_ROWS:
        out = rows_first(rows, kernel)
    else:
        out = jax.lax.platform_dependent(rows, kernel, cpu=kernel_first, default=rows_first)
    return out.reshape(*x.shape[:-1], kernel.shape[0])


@jax.custom_vjp
def logits(x: jax.Array, rows_VD: jax.Array) -> jax.Array:
    """[..., D] -> float32 [..., V] against the rows of a head or an embedding.

    The backward pass multiplies in the dtype of the rows, like the forward pass. By JAX's own rule
    it would multiply the float32 cotangent by a float32 copy of them.
    """
    return linear(x, rows_VD, jnp.float32)


def _logits_forward(x: jax.Array, rows_VD: jax.Array) -> tuple[jax.Array, tuple]:
    return linear(x, rows_VD, jnp.float32), (x, rows_VD)


def _logits_backward(saved: tuple, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, rows_VD = saved
    bar = bar.astype(rows_VD.dtype)
    x_bar = jnp.einsum("...v,vd->...d", bar, rows_VD)
    rows_bar = jnp.einsum("nv,nd->vd", *(y.reshape(-1, y.shape[-1]) for y in (bar, x)))
    return x_bar.astype(x.dtype), rows_bar.astype(rows_VD.dtype)


logits.defvjp(_logits_forward, _logits_backward)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32.

    `stack` puts leading axes on the scale, so that one parameter serves several layers.
    """

    size: int
    epsilon: float
    stack: tuple[int, ...] = ()

    def setup(self) -> None:
        self.scale = self.param("scale", nn.initializers.ones, (*self.stack, self.size))

    def __call__(self, x: jax.Array, index: int | None = None) -> jax.Array:
        scale = self.scale if index is None else self.scale[index]
        return rms_norm(x, scale, self.epsilon)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`x / rms(x) * scale` over the last axis; float32 inside, the dtype of `x` outside."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = (x32 * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)
    return normed * scale.astype(x.dtype)


class Projection(nn.Module):
    """A linear map from the trailing `in_shape` axes to `out_shape` axes, bias optional.

    Kernels are [out..., in...] like the checkpoints' rows, with group axes apart, so that each can
    be sharded by name.
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    use_bias: bool
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", INIT, (*self.out_shape, *self.in_shape)).astype(self.dtype)
        fan_in, fan_out = math.prod(self.in_shape), math.prod(self.out_shape)
        lead = x.shape[: x.ndim - len(self.in_shape)]
        out = linear(x.reshape(*lead, fan_in), kernel.reshape(fan_out, fan_in))
        out = out.reshape(*lead, *self.out_shape)
        if self.use_bias:
            out += self.param("bias", nn.initializers.zeros, self.out_shape).astype(self.dtype)
        return out


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`; gate and up are one fused projection."""

    hidden_size: int
    intermediate_size: int
    use_bias: bool
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = Projection(
            (self.hidden_size,),
            (2, self.intermediate_size),
            self.use_bias,
            self.dtype,
            name="gate_up",
        )(x)
        hidden = nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return Projection(
            (self.intermediate_size,), (self.hidden_size,), self.use_bias, self.dtype, name="down"
        )(hidden)


def grouped_linear(rows: jax.Array, kernels: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows sorted by group [n, in], kernels [E, out, in] -> [n, out]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return jax.lax.ragged_dot_general(rows, kernels, sizes_E, dimensions)


class MixtureOfExperts(nn.Module):
    """Qwen3-MoE: softmax over all experts in float32, top-k, renormalised where the config says so.

    Tokens are sorted by expert and multiplied group by group, so each token meets its k experts
    only.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    dtype: Dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D, F, E, top_k = (
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            self.num_experts_per_tok,
        )
        gate_up = self.param("gate_up", INIT, (E, 2, F, D)).astype(self.dtype)
        down = self.param("down", INIT, (E, D, F)).astype(self.dtype)
        rows = x.reshape(-1, D)
        router = Projection((D,), (E,), False, self.dtype, name="router")(rows)
        probs, experts = jax.lax.top_k(jax.nn.softmax(router.astype(jnp.float32)), top_k)
        if self.norm_topk_prob:
            probs /= jnp.sum(probs, axis=-1, keepdims=True)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=E).astype(jnp.int32)
        picked = jnp.repeat(rows, top_k, axis=0)[order]
        hidden = grouped_linear(picked, gate_up.reshape(E, 2 * F, D), sizes)
        hidden = nn.silu(hidden[:, :F]) * hidden[:, F:]
        out = grouped_linear(hidden, down, sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(-1, top_k, D)
        out = jnp.sum(out * probs[..., None].astype(out.dtype), axis=1)
        return out.reshape(x.shape).astype(x.dtype)
