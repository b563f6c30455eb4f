"""Head and cross-entropy: values, gradients and counts, memory and matrix products."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.layers import logits
from tests.test_loss import assert_trees_close, loss_config
from train.loss import head_loss, slot_weights


def head_inputs(batch=2, anchors=5, block=4, width=8, vocabulary=11, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(batch, anchors, block, width)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(width, vocabulary)), jnp.float32)
    labels = np.asarray(hidden @ kernel).argmax(-1)
    labels = np.where(rng.random(labels.shape) < 0.3, (labels + 1) % vocabulary, labels)
    supervised = rng.random(labels.shape) < 0.7
    supervised[..., 0] = False
    supervised[0, 0] = False
    return hidden, kernel, jnp.asarray(labels), jnp.asarray(supervised)


@pytest.mark.parametrize("soft_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("kind", "blocks"), [("decay", 2), ("uniform", 2), ("dpace", 2), ("decay", 1), ("dpace", 8)]
)
def test_head_loss_equals_all_blocks_at_once(kind, blocks, soft_weight):
    """Against autodiff of log_softmax of all logits; weights are constants of the gradient."""
    hidden, kernel, labels, supervised = head_inputs()
    teacher = head_inputs(seed=1)[0] if soft_weight else None
    config = loss_config(kind, blocks * 2 * 3 * 11 * 4 * (2 if soft_weight else 1))
    config = dataclasses.replace(config, soft_weight=soft_weight)

    def numerator(hidden):
        sums = head_loss(lambda x: x @ kernel, hidden, labels, supervised, config, teacher)
        return 3 * sums.numerator, sums

    def direct(hidden):
        log_probs = jax.nn.log_softmax(hidden @ kernel)[:, :, 1:]
        log_prob = jnp.take_along_axis(log_probs, labels[:, :, 1:, None], -1)[..., 0]
        probs = jax.lax.stop_gradient(jnp.exp(log_prob))
        weights = slot_weights(supervised[..., 1:], probs, config)
        loss = -(1 - soft_weight) * log_prob
        if soft_weight:
            goal = jax.nn.softmax(teacher @ kernel)[:, :, 1:]
            loss -= soft_weight * jnp.sum(goal * log_probs, axis=-1)
        return 3 * jnp.sum(weights * loss), jnp.sum(weights)

    (value, sums), bar = jax.jit(jax.value_and_grad(numerator, has_aux=True))(hidden)
    (want, weight), want_bar = jax.jit(jax.value_and_grad(direct, has_aux=True))(hidden)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    scale = float(jnp.abs(want_bar).max())
    np.testing.assert_allclose(bar / scale, want_bar / scale, atol=1e-6, rtol=0)
    np.testing.assert_allclose(sums.denominator, 2 if kind == "dpace" else weight, rtol=1e-6)
    assert not np.asarray(bar[:, :, 0]).any()
    alone = jax.jit(numerator)(hidden)[1]
    assert_trees_close(alone, sums, rtol=1e-6)


def test_the_gradient_keeps_the_dtype_of_the_hidden_states():
    """bfloat16 hidden states and head: 8 bits of a gradient computed in float32 up to the head."""
    hidden, kernel, labels, supervised = head_inputs()
    rows = kernel.T.astype(jnp.bfloat16)

    def numerator(hidden, rows):
        sums = head_loss(
            lambda x: logits(x, rows), hidden, labels, supervised, loss_config("decay")
        )
        return sums.numerator

    bar = jax.jit(jax.grad(numerator))(hidden.astype(jnp.bfloat16), rows)
    want = jax.jit(jax.grad(numerator))(
        hidden.astype(jnp.bfloat16).astype(jnp.float32), rows.astype(jnp.float32)
    )
    assert bar.dtype == jnp.bfloat16
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(bar.astype(jnp.float32) / scale, want / scale, atol=0.02, rtol=0)


def count_products(function, *args):
    """Matrix products in a traced function, those of inner jaxprs included."""
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


def test_the_head_is_applied_once():
    """Training: logits and the gradient from them. Evaluation: logits. No second forward pass."""
    hidden, kernel, labels, supervised = head_inputs()

    def numerator(hidden):
        config = loss_config("decay")
        return head_loss(lambda x: x @ kernel, hidden, labels, supervised, config).numerator

    assert count_products(numerator, hidden) == 1
    assert count_products(jax.grad(numerator), hidden) == 2


def test_head_in_reverse_equals_autodiff():
    """`layers.logits` has a backward pass of its own."""
    hidden, kernel, *_ = head_inputs()

    def value(function):
        return lambda x, rows: jnp.sum(jnp.sin(function(x, rows)))

    got = jax.grad(value(logits), (0, 1))(hidden, kernel.T)
    want = jax.grad(value(lambda x, rows: x @ rows.T), (0, 1))(hidden, kernel.T)
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_counts():
    """Accuracy by slot, and the simulated acceptance length, by a loop over blocks."""
    hidden, kernel, labels, supervised = head_inputs()
    sums = head_loss(lambda x: x @ kernel, hidden, labels, supervised, loss_config("decay"))
    right = np.asarray((hidden @ kernel).argmax(-1) == labels) & np.asarray(supervised)
    accepted = blocks = 0
    for block, has_label in zip(right.reshape(-1, 4), supervised.any(-1).ravel(), strict=True):
        if has_label:
            run = [*block[1:], False].index(False)
            accepted, blocks = accepted + run + 1, blocks + 1
    assert 0 < accepted - blocks < right.sum()
    assert (float(sums.accepted), float(sums.blocks)) == (accepted, blocks)
    np.testing.assert_array_equal(sums.correct_G, right.sum((0, 1)))
    np.testing.assert_array_equal(sums.supervised_G, supervised.sum((0, 1)))
    assert sums.correct_G[0] == sums.supervised_G[0] == 0


def test_logits_of_all_blocks_never_exist():
    hidden, kernel, labels, supervised = head_inputs(2, 32, 4, 8, 512)
    all_logits = hidden[:, :, 1:, 0].size * 512 * 4

    def temporary_bytes(chunk_bytes):
        @jax.jit
        @jax.grad
        def bar(hidden):
            config = loss_config("decay", chunk_bytes)
            return head_loss(lambda x: x @ kernel, hidden, labels, supervised, config).numerator

        memory: Any = bar.lower(hidden).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary_bytes(all_logits // 16) < all_logits / 2
    assert temporary_bytes(all_logits) > all_logits
