"""Loss, accuracy and gradients of a training step against an open PyTorch trainer's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import target_forward
from dflash_jax.weights import drafter_table, export_tensors
from train.loss import LossConfig, drafter_loss, mean_loss

pytestmark = pytest.mark.golden

# Logits of 3 anchors at once, which do not divide the 8.
CHUNK_BYTES = 3 * (3 * 7 * 96 * 4) + 4
LOSSES = {
    "decay4": LossConfig("decay", gamma=4.0, chunk_bytes=CHUNK_BYTES),
    "uniform": LossConfig("uniform", gamma=4.0, chunk_bytes=CHUNK_BYTES),
    "dpace": LossConfig("dpace", gamma=4.0, alpha=0.5, chunk_bytes=CHUNK_BYTES),
}
GRADIENTS = (
    "fc.weight",
    "hidden_norm.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.2.mlp.down_proj.weight",
)


@pytest.fixture(scope="module")
def models(golden):
    target = load_target(golden.path("qwen3", "target"), dtype="float32")
    return target, load_drafter(golden.path("qwen3", "drafter"), target, dtype="float32")


@pytest.fixture(scope="module")
def vectors(golden):
    return golden.vectors("qwen3", "training.safetensors")


@pytest.mark.parametrize("attention", ["dense", "chunked"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_step(models, vectors, name, attention):
    target, drafter = models
    batch = {
        "tokens_BT": jnp.asarray(vectors["input_ids"], jnp.int32),
        "loss_mask_BT": jnp.asarray(vectors["loss_mask"]),
    }

    @jax.jit
    def step(params):
        def loss_of(params):
            sums = drafter_loss(
                target.model,
                target.params,
                drafter.model,
                params,
                batch,
                jnp.asarray(vectors["context_features"]),
                jnp.asarray(vectors["anchor_positions"], jnp.int32),
                jnp.asarray(vectors["block_keep_mask"]),
                LOSSES[name],
                attention,
            )
            return mean_loss(sums), sums

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    (loss, sums), gradients = step(drafter.params)
    for key, value in (
        ("loss_numerator", sums.numerator),
        ("loss_denominator", sums.denominator),
        ("loss", loss),
        ("accuracy", jnp.sum(sums.correct_G) / jnp.sum(sums.supervised_G)),
    ):
        np.testing.assert_allclose(value, vectors[f"{name}.{key}"][0], rtol=1e-5, err_msg=key)
    exported = export_tensors(drafter_table(drafter.config), jax.device_get(gradients))
    for weight in GRADIENTS:
        want = vectors[f"{name}.grad.{weight}"]
        assert np.abs(want).max() > 1e-3  # The tolerance below sees errors of a per cent.
        np.testing.assert_allclose(exported[weight], want, atol=1e-5, rtol=0, err_msg=weight)


def test_context_features_are_the_targets(models, vectors):
    """The features that the trainer was given come out of our target too."""
    target, drafter = models
    _, features = target_forward(target, vectors["input_ids"], drafter.config.target_layer_ids)
    np.testing.assert_allclose(features, vectors["context_features"], atol=1e-4, rtol=0)
