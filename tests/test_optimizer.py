"""Schedules, decay mask, clipping, Muon by a plain formula."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflash_jax as dj
from dflash_jax.sharding import make_mesh, path_name
from train.optimizer import decayed, dimension_numbers, make_optimizer, make_schedule
from train.settings import OptimizerSettings
from train.state import create_state

SETTINGS = OptimizerSettings(
    name="adamw",
    learning_rate=6e-4,
    muon_learning_rate=3e-3,
    schedule="cosine",
    decay_ratio=0.2,
    decay_shape="linear",
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


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_warm_up_stable_decay(shape: str) -> None:
    settings = dataclasses.replace(SETTINGS, schedule="wsd", decay_shape=shape)
    rates = np.array([make_schedule(settings, 100)(step) for step in range(101)]) / 6e-4
    np.testing.assert_allclose(rates[:4], np.array([1, 2, 3, 4]) / 4, rtol=1e-6)
    np.testing.assert_allclose(rates[4:81], 1, rtol=1e-6)
    left = np.arange(21) / 20
    falling = 1 - (np.sqrt(left) if shape == "1-sqrt" else left)
    np.testing.assert_allclose(rates[80:], falling, atol=1e-6)
    assert rates[99] > 0 == rates[100]


def tiny_params() -> dict:
    target = dj.init_target(dj.TargetConfig.tiny("qwen3"))
    config = dj.DrafterConfig.for_target(
        target.config,
        mask_token_id=1,
        num_layers=2,
        target_layer_ids=(0, 2),
        block_size=4,
        attention_bias=True,
    )
    return dj.init_drafter(target, config).params


def checkpoint_matrices(name: str, kernel: np.ndarray) -> Iterator[tuple[tuple, np.ndarray]]:
    """(index into the kernel, the [out, in] matrix there) of the matrices that a file holds."""
    if name == "kv/kernel":
        for layer in range(kernel.shape[0]):
            for i in range(2):  # key, value
                index = (layer, slice(None), i)
                yield index, kernel[index].reshape(-1, kernel.shape[-1])
    elif name.endswith("gate_up/kernel"):
        for i in range(2):
            yield (i,), kernel[i]
    elif name.endswith(("attention/out/kernel", "fc/kernel", "down/kernel")):
        yield (), kernel.reshape(kernel.shape[0], -1)
    else:
        yield (), kernel.reshape(-1, kernel.shape[-1])


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz steps of the published coefficients, on the [out, in] matrix."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x - 4.7750 * x @ gram + 2.0315 * x @ gram @ gram
    return x


def test_two_steps_of_muon_by_a_plain_formula() -> None:
    settings = dataclasses.replace(SETTINGS, name="muon", clip_norm=1e9)
    optimizer, params = make_optimizer(settings, 100), tiny_params()
    state, start = optimizer.init(params), params
    rng = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        for _ in range(2)
    ]
    muon_step = jax.jit(optimizer.update)
    for grad in grads:
        updates, state = muon_step(grad, state, params)
        params = optax.apply_updates(params, updates)
    adamw = make_optimizer(dataclasses.replace(settings, name="adamw"), 100)
    others, adamw_state = start, adamw.init(start)
    adamw_step = jax.jit(adamw.update)
    for grad in grads:
        updates, adamw_state = adamw_step(grad, adamw_state, others)
        others = optax.apply_updates(others, updates)

    beta, rates = 0.95, [3e-3 / 4, 3e-3 / 2]
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(start),
        *map(jax.tree.leaves, (params, others, *grads)),
        strict=True,
    )
    kernels = 0
    for (path, before), after, by_adamw, *both in leaves:
        name = path_name(path)
        if not name.endswith("kernel"):
            np.testing.assert_array_equal(after, by_adamw, err_msg=name)
            continue
        kernels += 1
        expected, moment = np.array(before, np.float64), 0.0
        for step, (grad, rate) in enumerate(zip(both, rates, strict=True), 1):
            moment = beta * moment + (1 - beta) * grad.astype(np.float64)
            ahead = beta * moment / (1 - beta ** (step + 1)) + (1 - beta) * grad / (1 - beta**step)
            old = expected.copy()
            for index, matrix in checkpoint_matrices(name, ahead):
                update = 0.2 * np.sqrt(max(matrix.shape)) * orthogonal(matrix)
                update = update.reshape(ahead[index].shape) + 0.1 * old[index]
                expected[index] = old[index] - rate * update
        # float32 against float64, five times through cubes of the matrix
        np.testing.assert_allclose(after, expected, atol=1e-6, rtol=0, err_msg=name)
    assert kernels == 2 + 4 * 2  # fc, kv; q, out, gate_up, down of two layers


def test_muon_refuses_a_kernel_that_it_does_not_know() -> None:
    with pytest.raises(KeyError, match="conv/kernel: Muon does not know"):
        dimension_numbers({"conv": {"kernel": jnp.ones((2, 2))}})


def test_muon_on_eight_devices_as_on_one() -> None:
    optimizer = make_optimizer(dataclasses.replace(SETTINGS, name="muon"), 100)
    updated = []
    for mesh in (make_mesh(), make_mesh(2, 2, 2)):
        make, abstract = create_state(tiny_params, optimizer, 0, mesh)
        state = make()
        moments = optax.tree.get_all_with_path(state.opt_state, "mu")
        for _, moment in moments:
            for path, leaf in jax.tree_util.tree_leaves_with_path(moment):
                param = state.params
                for key in path:
                    param = param[key.key]
                assert leaf.sharding == param.sharding, path_name(path)
        assert len(moments) == 2
        grads = jax.tree.map(jnp.cos, state.params)
        updates, _ = jax.jit(optimizer.update)(grads, state.opt_state, state.params)
        updated.append(updates)
        assert jax.tree.map(jnp.shape, abstract.opt_state) == jax.tree.map(
            jnp.shape, state.opt_state
        )
    for one, eight in zip(*map(jax.tree.leaves, updated), strict=True):
        np.testing.assert_allclose(one, eight, atol=1e-6, rtol=0)
