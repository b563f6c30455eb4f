"""Rotary position embeddings (rotate-half form), equal to Transformers' `modeling_rope_utils`."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency per channel pair, float32 [H/2], and the factor on cos and sin.

    Host arithmetic in float32 in Transformers' order (torch divides a scalar by a tensor as
    scalar * reciprocal), because position 40000 makes one unit in the last place of a frequency
    visible; only the power is float64, rounded once. Never bfloat16.
    """
    f32 = np.float32
    exponents_h = np.arange(0, head_dim, 2).astype(f32) / f32(head_dim)
    powers_h = np.power(rope.theta, exponents_h.astype(np.float64)).astype(f32)
    frequencies_h = f32(1.0) / powers_h
    if rope.rope_type == "linear":
        return frequencies_h / f32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies_h), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, powers_h), _yarn_attention_factor(rope)
    return frequencies_h, 1.0


def _llama3(rope: RopeConfig, frequencies_h: np.ndarray) -> np.ndarray:
    """Three bands: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    f32 = np.float32
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    assert factor is not None
    assert low is not None
    assert high is not None
    assert original is not None
    wavelengths_h = f32(2 * math.pi) * (f32(1.0) / frequencies_h)
    smooth_h = (f32(original) * (f32(1.0) / wavelengths_h) - f32(low)) / f32(high - low)
    ramp_h = (1 - smooth_h) * frequencies_h / f32(factor) + smooth_h * frequencies_h
    scaled_h = np.where(wavelengths_h > original / low, frequencies_h / f32(factor), ramp_h)
    return np.where(wavelengths_h < original / high, frequencies_h, scaled_h).astype(f32)


def _yarn(rope: RopeConfig, head_dim: int, powers_h: np.ndarray) -> np.ndarray:
    """Interpolated below, kept above a range of dimensions given by rotations in the context."""
    f32 = np.float32
    original, factor = rope.original_max_position_embeddings, rope.factor
    assert original is not None
    assert factor is not None

    def dimension(rotations: float) -> float:
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as Transformers: no division by zero
    ramp_h = np.clip((np.arange(head_dim // 2, dtype=f32) - f32(low)) / f32(high - low), 0, 1)
    keep_h = 1 - ramp_h
    interpolated_h = f32(1.0) / (f32(factor) * powers_h)
    return (interpolated_h * (1 - keep_h) + f32(1.0) / powers_h * keep_h).astype(f32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = rope.factor
    assert factor is not None

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_cos_sin(
    positions: jax.Array, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotation angles, float32, shape [..., H] for positions [...].

    Both halves of the last axis hold the same angles (rotate-half layout); yarn's attention
    factor is included.
    """
    frequencies_h, factor = inverse_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies_h)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., H]; cos and sin [..., H] must broadcast against it (add the head axis).

    The product is taken in float32 and returned in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (x32 * cos + rotated * sin).astype(x.dtype)
