"""Schedule, decay mask, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.sharding import path_name
from train.optimizer import decayed, make_optimizer, make_schedule
from train.settings import OptimizerSettings

SETTINGS = OptimizerSettings(
    learning_rate=6e-4,
    warmup_ratio=0.04,
    clip_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
)
PARAMS = {
    "fc": {"kernel": jnp.ones((4, 2))},
    "k_norm": {"scale": jnp.ones((2, 2))},
    "kv": {"kernel": jnp.ones((2, 2, 1, 2, 2)), "bias": jnp.ones((2, 1, 2, 2))},
    "layers_0": {"attention": {"out": {"bias": jnp.ones(2)}}, "input_norm": {"scale": jnp.ones(2)}},
}


def test_schedule() -> None:
    rates = np.array([make_schedule(SETTINGS, 100)(step) for step in range(100)])
    np.testing.assert_allclose(rates[:4], 6e-4 * np.array([1, 2, 3, 4]) / 4, rtol=1e-6)
    np.testing.assert_allclose(rates[4], 6e-4, rtol=1e-6)
    np.testing.assert_allclose(rates[52], 3e-4, rtol=1e-5)  # half-way down the cosine
    assert np.all(np.diff(rates[4:]) < 0)
    assert 0 < rates[-1] < 1e-6


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_short_runs_have_no_warm_up_and_still_move(num_steps: int) -> None:
    rates = [float(make_schedule(SETTINGS, num_steps)(step)) for step in range(num_steps)]
    assert rates[0] == pytest.approx(6e-4)
    assert min(rates) > 0


def test_norms_and_biases_do_not_decay() -> None:
    optimizer = make_optimizer(SETTINGS, 100)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        first_rate = 6e-4 / 4
        expected = -first_rate * 0.1 if path_name(path).endswith("kernel") else 0.0
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=path_name(path))
    assert sum(jax.tree.leaves(decayed(PARAMS))) == 2


def test_gradients_are_clipped_by_their_global_norm() -> None:
    optimizer = make_optimizer(SETTINGS, 100)
    grads = jax.tree.map(lambda p: 1e3 * jnp.ones_like(p), PARAMS)
    _, state = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    moments = optax.tree.get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(moments), (1 - 0.9) * 1.0, rtol=1e-5)
