"""The sharding table covers every parameter, and one or eight devices give the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import init_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.sharding import (
    LOGICAL_AXES,
    batch_sharding,
    logical_axes,
    make_mesh,
    param_shardings,
    partition_spec,
    path_name,
    replicated,
)
from dflash_jax.target import Target, TargetModel, init_target

BIASED = {"attention_bias": True}


def abstract_target(config: TargetConfig) -> dict:
    return jax.eval_shape(lambda: init_target(config).params)


def abstract_drafter(config: TargetConfig, **changes: Any) -> dict:
    target = Target(config, TargetModel(config, jnp.float32), {})
    drafter = DrafterConfig.for_target(
        config, mask_token_id=1, num_layers=2, target_layer_ids=(0, 2), block_size=4, **changes
    )
    return jax.eval_shape(lambda: init_drafter(target, drafter).params)


TREES = {
    "llama": lambda: abstract_target(TargetConfig.tiny("llama", **BIASED, mlp_bias=True)),
    "qwen3": lambda: abstract_target(TargetConfig.tiny("qwen3")),
    "moe": lambda: abstract_target(TargetConfig.tiny("qwen3_moe")),
    "drafter": lambda: abstract_drafter(TargetConfig.tiny("qwen3"), **BIASED),
}


@pytest.mark.parametrize("tree", TREES)
def test_every_parameter_has_a_spec_that_divides_it(tree: str) -> None:
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    params = TREES[tree]()
    shardings = param_shardings(params, mesh, strict=True)
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        sharding.shard_shape(leaf.shape)  # raises where it does not divide
        split = {axis for axis in sharding.spec if axis}
        matrix = "norm" not in path_name(path) and "bias" not in path_name(path)
        assert ("fsdp" in split) == matrix, path_name(path)


def test_every_entry_of_the_table_is_used() -> None:
    names = {
        path_name(path)
        for tree in TREES.values()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree())
    }
    untied = {"lm_head/kernel"}
    for pattern, axes in LOGICAL_AXES:
        example = pattern.replace(r"\w*", "input_")
        assert logical_axes(example, len(axes)) == axes
        assert any(name.endswith(example) for name in names | untied), pattern


def test_specs() -> None:
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    assert partition_spec("layers_0/attention/qkv/kernel", (2, 4, 8, 32), mesh) == P(
        "tensor", None, None, "fsdp"
    )
    assert partition_spec("layers_3/attention/out/kernel", (32, 2, 2, 8), mesh) == P(
        "fsdp", "tensor"
    )
    assert partition_spec("kv/kernel", (3, 2, 2, 8, 32), mesh) == P(
        None, "tensor", None, None, "fsdp"
    )
    assert partition_spec("opt/0/mu/layers_0/mlp/down/kernel", (32, 48), mesh) == P(
        "fsdp", "tensor"
    )
    assert partition_spec("k_norm/scale", (2, 8), mesh) == P()
    assert partition_spec("step", (), mesh) == P()


def test_an_axis_that_does_not_divide_stays_whole_or_is_refused() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    name, shape = "layers_0/attention/qkv/kernel", (3, 5, 64, 576)  # SmolLM2-135M
    assert partition_spec(name, shape, mesh) == P(None, None, None, "fsdp")
    with pytest.raises(ConfigError, match=r"qkv/kernel: kv_heads has 3 .* tensor = 2"):
        partition_spec(name, shape, mesh, strict=True)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(KeyError, match="layers_0/conv/kernel: no entry"):
        logical_axes("layers_0/conv/kernel", 2)
    with pytest.raises(KeyError, match="fc/kernel: 3 axes"):
        logical_axes("fc/kernel", 3)


def test_mesh_errors_state_both_numbers() -> None:
    with pytest.raises(ConfigError, match="= 16 devices, but 8 are available"):
        make_mesh(data=4, fsdp=2, tensor=2)
    with pytest.raises(ConfigError, match=r"mesh\.fsdp: 0 is below 1"):
        make_mesh(fsdp=0)
    assert dict(make_mesh(fsdp=2).shape) == {"data": 1, "fsdp": 2, "tensor": 1}


def test_eight_devices_compute_what_one_does() -> None:
    target = init_target(TargetConfig.tiny("qwen3"))
    tokens = np.arange(48, dtype=np.int32).reshape(8, 6) % 40

    def logits(params: dict, tokens: jax.Array) -> jax.Array:
        apply: Any = target.model.apply
        hidden, _, _ = apply({"params": params}, tokens)
        return apply({"params": params}, hidden, method="head")

    expected = jax.jit(logits)(target.params, tokens)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    params = jax.device_put(target.params, param_shardings(target.params, mesh))
    rows = jax.device_put(tokens, batch_sharding(mesh))
    out = jax.jit(logits, out_shardings=replicated(mesh))(params, rows)
    # float32 sums in another order: a few units in the last place of logits of order 1
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)
