"""Names and layouts: published tensors -> parameters -> the same bytes; faults listed together."""

import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import weights
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import init_drafter
from dflash_jax.errors import WeightsError
from dflash_jax.sharding import path_name
from dflash_jax.target import init_target
from dflash_jax.weights import drafter_table, export_tensors, load_params, target_table

CASES = ["qwen3", "llama", "qwen3_moe"]


class Memory:
    """Tensors in memory as a source."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def where(self, name):
        return f"memory: {name}"

    def read(self, name):
        return self.tensors[name]


def _numbered(table, dtype=np.float32):
    """A checkpoint whose elements are all different."""
    tensors, start = {}, 0
    for name, row in table.items():
        size = math.prod(row.tensor_shape)
        tensors[name] = np.arange(start, start + size, dtype=dtype).reshape(row.tensor_shape)
        start += size
    return tensors


def _leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def _shapes(tree):
    return {name: tuple(leaf.shape) for name, leaf in _leaves(tree).items()}


def _read(golden, case, part, cls):
    return cls.from_hf(json.loads(golden.path(case, part, "config.json").read_text()))


TARGETS = {
    "llama": TargetConfig.tiny(),
    "llama_biased": TargetConfig.tiny(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_hidden_layers=2
    ),
    "qwen3": TargetConfig.tiny("qwen3", num_hidden_layers=2, head_dim=16),
    "qwen3_moe": TargetConfig.tiny(
        "qwen3_moe", num_hidden_layers=2, moe_layers=(True, False), attention_bias=True
    ),
}
DRAFTERS = {
    "plain": DrafterConfig.for_target(
        TARGETS["llama"], mask_token_id=3, num_layers=2, target_layer_ids=(1, 3), block_size=4
    ),
    "biased": DrafterConfig.for_target(
        TARGETS["llama"],
        mask_token_id=3,
        num_layers=2,
        target_layer_ids=(1, 3),
        attention_bias=True,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_target_table_fills_exactly_the_parameters_of_the_model(name):
    config = TARGETS[name]
    want = _shapes(jax.eval_shape(lambda: init_target(config).params))
    table = target_table(config)
    params = load_params(table, Memory(_numbered(table)), np.float32, label="memory")
    assert _shapes(params) == want
    values = np.concatenate([leaf.ravel() for leaf in _leaves(params).values()])
    assert len(np.unique(values)) == len(values) == sum(map(math.prod, want.values()))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_table_fills_exactly_the_parameters_of_the_model(name):
    config = DRAFTERS[name]
    target = init_target(TARGETS["llama"])
    want = _shapes(jax.eval_shape(lambda: init_drafter(target, config).params))
    table = drafter_table(config)
    params = load_params(table, Memory(_numbered(table)), np.float32, label="memory")
    assert _shapes(params) == want
    values = np.concatenate([leaf.ravel() for leaf in _leaves(params).values()])
    assert len(np.unique(values)) == len(values) == sum(map(math.prod, want.values()))


def test_published_drafters_have_58_tensors_for_5_layers():
    table = drafter_table(DrafterConfig.qwen3_8b())
    assert len(table) == 58
    assert table["fc.weight"].tensor_shape == (4096, 5 * 4096)
    assert table["layers.4.self_attn.k_proj.weight"].tensor_shape == (1024, 4096)
    assert table["layers.0.self_attn.o_proj.weight"].tensor_shape == (4096, 4096)
    assert table["layers.0.mlp.down_proj.weight"].tensor_shape == (4096, 12288)
    assert not any("embed" in name or "lm_head" in name for name in table)
    biased = drafter_table(DrafterConfig.gpt_oss_20b())
    assert {"bias"} == {name.rsplit(".")[-1] for name in biased} - {"weight"}
    assert len(biased) == 3 + 8 * (11 + 4)


def test_fused_layouts_keep_each_head_where_the_model_reads_it():
    config = TARGETS["qwen3"]
    tensors = _numbered(target_table(config))
    params = load_params(target_table(config), Memory(tensors), np.float32, label="memory")
    attention = params["layers_1"]["attention"]
    q, k, v = (tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    H, R = config.head_dim, config.num_groups
    for head in range(config.num_attention_heads):
        kernel = attention["qkv"]["kernel"][head // R, head % R]
        np.testing.assert_array_equal(kernel, q[head * H : (head + 1) * H])
        out = tensors["model.layers.1.self_attn.o_proj.weight"][:, head * H : (head + 1) * H]
        np.testing.assert_array_equal(attention["out"]["kernel"][:, head // R, head % R], out)
    for head in range(config.num_key_value_heads):
        rows = slice(head * H, (head + 1) * H)
        np.testing.assert_array_equal(attention["qkv"]["kernel"][head, R], k[rows])
        np.testing.assert_array_equal(attention["qkv"]["kernel"][head, R + 1], v[rows])
    mlp = params["layers_1"]["mlp"]
    up = tensors["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(mlp["gate_up"]["kernel"][1], up)


def test_drafter_keys_and_values_are_stacked_over_layers():
    config = DRAFTERS["biased"]
    tensors = _numbered(drafter_table(config))
    params = load_params(drafter_table(config), Memory(tensors), np.float32, label="memory")
    H, R = config.head_dim, config.num_groups
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.self_attn"
        for head in range(config.num_key_value_heads):
            rows = slice(head * H, (head + 1) * H)
            for slot, part in enumerate("kv"):
                weight, bias = (tensors[f"{name}.{part}_proj.{k}"] for k in ("weight", "bias"))
                kernel = params["kv"]["kernel"][layer, head, slot]
                np.testing.assert_array_equal(kernel, weight[rows])
                np.testing.assert_array_equal(params["kv"]["bias"][layer, head, slot], bias[rows])
        np.testing.assert_array_equal(
            params["k_norm"]["scale"][layer], tensors[f"{name}.k_norm.weight"]
        )
        q = params[f"layers_{layer}"]["attention"]["q"]["kernel"]
        for head in range(config.num_attention_heads):
            rows = tensors[f"{name}.q_proj.weight"][head * H : (head + 1) * H]
            np.testing.assert_array_equal(q[head // R, head % R], rows)


def test_experts_land_in_their_own_slot():
    config = TARGETS["qwen3_moe"]
    tensors = _numbered(target_table(config))
    params = load_params(target_table(config), Memory(tensors), np.float32, label="memory")
    moe = params["layers_0"]["moe"]
    for e in range(config.num_experts):
        name = f"model.layers.0.mlp.experts.{e}"
        np.testing.assert_array_equal(moe["gate_up"][e, 0], tensors[f"{name}.gate_proj.weight"])
        np.testing.assert_array_equal(moe["down"][e], tensors[f"{name}.down_proj.weight"])
    assert "mlp" in params["layers_1"]


@pytest.mark.golden
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_golden_drafters_round_trip_bit_exactly(golden, case, dtype):
    table = drafter_table(_read(golden, case, "drafter", DrafterConfig))
    published = load_file(golden.path(case, "drafter", "model.safetensors"))
    published = {name: tensor.astype(dtype) for name, tensor in published.items()}
    params = load_params(table, Memory(published), dtype, label="memory")
    exported = export_tensors(table, params)
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert exported[name].dtype == tensor.dtype
        assert exported[name].shape == tensor.shape
        assert exported[name].flags.c_contiguous
        assert exported[name].tobytes() == tensor.tobytes()


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
def test_golden_targets_round_trip_bit_exactly(golden, case):
    table = target_table(_read(golden, case, "target", TargetConfig))
    published = load_file(golden.path(case, "target", "model.safetensors"))
    params = load_params(table, Memory(published), np.float32, label="memory")
    exported = export_tensors(table, params)
    assert exported.keys() == published.keys()
    assert all(exported[name].tobytes() == published[name].tobytes() for name in published)


def test_missing_unexpected_and_misshapen_tensors_are_listed_together():
    table = drafter_table(DRAFTERS["plain"])
    tensors = _numbered(table)
    del tensors["layers.1.self_attn.q_norm.weight"]
    tensors["embed_tokens.weight"] = np.zeros((40, 32), np.float32)
    tensors["fc.weight"] = np.zeros((32, 96), np.float32)
    with pytest.raises(WeightsError) as caught:
        load_params(table, Memory(tensors), np.float32, label="here/model")
    message = str(caught.value)
    assert "here/model: 3 tensors" in message
    assert "missing layers.1.self_attn.q_norm.weight" in message
    assert "unexpected memory: embed_tokens.weight" in message
    assert "memory: fc.weight has shape (32, 96), the config asks for (32, 64)" in message


def test_float16_checkpoints_are_widened_and_never_computed_in():
    table = drafter_table(DRAFTERS["plain"])
    tensors = {n: np.full(r.tensor_shape, 6.1e4, np.float16) for n, r in table.items()}
    for dtype in (np.float32, ml_dtypes.bfloat16):
        params = load_params(table, Memory(tensors), dtype, label="memory", finite=True)
        value = params["fc"]["kernel"][0, 0]
        assert value == np.float32(np.float16(6.1e4)).astype(dtype)
    with pytest.raises(WeightsError, match="float16"):
        load_params(table, Memory(tensors), np.float16, label="memory")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_refused_both_ways(dtype, bad):
    table = drafter_table(DRAFTERS["plain"])
    tensors = {n: np.ones(r.tensor_shape, dtype) for n, r in table.items()}
    params = load_params(table, Memory(tensors), dtype, label="memory", finite=True)
    tensors["layers.1.mlp.up_proj.weight"][3, 4] = bad
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_params(table, Memory(tensors), dtype, label="memory", finite=True)
    params["kv"]["kernel"][1, 0, 1, 3, 2] = bad
    params["fc"]["kernel"] = params["fc"]["kernel"][1:]
    with pytest.raises(WeightsError, match=r"fc/kernel has shape .* kv/kernel holds NaN"):
        export_tensors(table, params)


def test_finite_check_sees_values_that_overflow_on_conversion():
    table = drafter_table(DRAFTERS["plain"])
    tensors = {n: np.ones(r.tensor_shape, np.float64) for n, r in table.items()}
    tensors["norm.weight"][0] = 1e300
    with np.errstate(over="ignore"), pytest.raises(WeightsError, match=r"norm\.weight"):
        load_params(table, Memory(tensors), np.float32, label="memory", finite=True)


def test_parameters_are_handed_over_one_by_one():
    table = drafter_table(DRAFTERS["plain"])
    seen = []
    load_params(
        table,
        Memory(_numbered(table)),
        np.float32,
        label="memory",
        put=lambda path, array: seen.append((path, array.shape)),
    )
    assert len(seen) == len({row.path for row in table.values()})
    assert ("kv/kernel", (2, 2, 2, 8, 32)) in seen


def _shards(folder, tensors):
    names = sorted(tensors)
    files = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_sharded_by_index_reads_like_one_file(tmp_path):
    tensors: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, np.float16),
    }
    tensors |= {"c": np.arange(3).astype(ml_dtypes.bfloat16), "d": np.zeros((0, 2), np.float32)}
    _shards(tmp_path, tensors)
    source = weights.SafetensorsSource(tmp_path)
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tensor.shape
        assert source.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(source.read(name), tensor)


def test_broken_checkpoints_name_the_file(tmp_path):
    with pytest.raises(WeightsError, match=r"neither model\.safetensors"):
        weights.SafetensorsSource(tmp_path)
    tensors = {name: np.ones((8, 8), np.float32) for name in "abc"}
    files = _shards(tmp_path, tensors)
    shard = tmp_path / files["b"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    with pytest.raises(WeightsError, match=rf"{files['b']}: truncated"):
        weights.SafetensorsSource(tmp_path)
    shard.write_bytes(b"")
    with pytest.raises(WeightsError, match=rf"{files['b']}: truncated, 0 bytes"):
        weights.SafetensorsSource(tmp_path)
    shard.unlink()
    with pytest.raises(WeightsError, match=rf"{files['b']}: a shard"):
        weights.SafetensorsSource(tmp_path)
    save_file({"other": tensors["b"]}, shard)
    with pytest.raises(WeightsError, match=r"index\.json: names \['b'\]"):
        weights.SafetensorsSource(tmp_path)
    shard.write_bytes((5).to_bytes(8, "little") + b"hello")
    with pytest.raises(WeightsError, match=rf"{files['b']}: no valid header"):
        weights.SafetensorsSource(tmp_path)


def test_quantised_tensors_are_refused(tmp_path):
    save_file({"a": np.ones(3, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="a has type I8"):
        weights.SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "nonsense"]
)
def test_a_broken_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        weights.SafetensorsSource(tmp_path)


def _tensor(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "not a safetensors file"),
        ({"a": {}}, "header of a"),
        ({"a": _tensor([3], 0, 8)}, "a of shape .* 8 bytes"),
        ({"a": _tensor([2], "0", "8")}, "header of a"),
        ({"a": _tensor([2.0], 0, 8)}, "header of a"),
        ({"a": _tensor([2], 0, 8, ["F32"])}, "header of a"),
        ({"a": _tensor([2], -8, 0)}, "header of a"),
        ({"a": _tensor([2], 8, 16)}, "a begins at 8, what is before ends at 0"),
        ({"a": _tensor([2], 0, 8), "b": _tensor([2], 4, 12)}, "b begins at 4, .* ends at 8"),
    ],
)
def test_a_broken_header_is_named(tmp_path, header, message):
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(WeightsError, match=rf"model\.safetensors: {message}"):
        weights.SafetensorsSource(tmp_path)
