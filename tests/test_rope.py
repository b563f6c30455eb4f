"""RoPE equals Transformers' `modeling_rope_utils`, attention factor included."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dflash_jax.config import RopeConfig
from dflash_jax.rope import apply_rope, inverse_frequencies, rope_cos_sin

POSITIONS = [0, 1, 7, 5000, 40000]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
CASES = {
    "default": (1e4, {"rope_type": "default"}),
    "default_1e6": (1e6, {"rope_type": "default"}),
    "default_1e7": (1e7, {"rope_type": "default"}),
    "linear": (1e4, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (5e5, LLAMA3),
    "llama3_short": (5e5, LLAMA3 | {"original_max_position_embeddings": 64}),
    "yarn": (1.5e5, YARN),
    "yarn_gpt_oss": (1.5e5, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    "yarn_factor": (1e6, YARN | {"factor": 4.0, "attention_factor": 0.7}),
    "yarn_mscale": (1e4, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
}


def _theirs(theta, parameters, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    return LlamaRotaryEmbedding(config)


def _ours(theta, parameters):
    return RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": parameters})


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_cos_sin_equal_transformers(case, head_dim):
    theta, parameters = CASES[case]
    module = _theirs(theta, parameters, head_dim)
    frequencies, factor = inverse_frequencies(_ours(theta, parameters), head_dim)
    theirs = module.inv_freq.numpy()
    # torch's float32 power is not always correctly rounded: at most one unit in the last place.
    ulps = np.abs(theirs.view(np.int32) - frequencies.view(np.int32))
    assert ulps.max() <= 1
    assert np.count_nonzero(ulps) <= 2
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)

    want = module(torch.zeros(1, 1), torch.tensor([POSITIONS]))
    got = rope_cos_sin(jnp.array([POSITIONS]), _ours(theta, parameters), head_dim)
    angles = np.array(POSITIONS, dtype=np.float32)[:, None] * theirs
    # That unit times the position, and the angle's own rounding; nothing where ulps is 0.
    one_ulp = (np.array(POSITIONS)[:, None] * np.spacing(theirs) + np.spacing(angles)) * ulps
    atol = factor * (1e-6 + np.concatenate([one_ulp, one_ulp], axis=-1))
    for ours, reference in zip(got, want, strict=True):
        assert ours.dtype == jnp.float32
        assert ours.shape == (1, len(POSITIONS), head_dim)
        difference = np.abs(np.asarray(ours)[0] - reference[0].numpy())
        assert (difference <= atol).all(), difference.max()


@pytest.mark.parametrize("case", CASES)
def test_apply_rope_equals_transformers(case):
    theta, parameters = CASES[case]
    rng = np.random.default_rng(0)
    q_BNTH = rng.standard_normal((2, 3, len(POSITIONS), 64), dtype=np.float32)
    cos, sin = rope_cos_sin(jnp.array(POSITIONS), _ours(theta, parameters), 64)
    got = apply_rope(jnp.asarray(q_BNTH), cos, sin)
    want, _ = apply_rotary_pos_emb(
        *(torch.from_numpy(q_BNTH),) * 2,
        torch.from_numpy(np.array(cos))[None],
        torch.from_numpy(np.array(sin))[None],
    )
    np.testing.assert_allclose(got, want.numpy(), atol=1e-6)


def test_apply_rope_keeps_the_dtype_and_computes_in_float32():
    cos, sin = rope_cos_sin(jnp.array([40000]), RopeConfig(theta=1e6), 64)
    x = jnp.linspace(-1, 1, 64)[None].astype(jnp.bfloat16)
    got = apply_rope(x, cos, sin)
    assert got.dtype == jnp.bfloat16
    exact = apply_rope(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = jnp.asarray(rng.standard_normal((2, 1, 64), dtype=np.float32))
    rope = RopeConfig(theta=1e4)

    def score(i, j):
        return jnp.sum(
            apply_rope(q, *rope_cos_sin(jnp.array([i]), rope, 64))
            * apply_rope(k, *rope_cos_sin(jnp.array([j]), rope, 64))
        )

    np.testing.assert_allclose(score(9, 4), score(105, 100), atol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2
