"""Configs: published files are read exactly, and what is not understood is refused by name."""

import json

import pytest

from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig, default_target_layer_ids
from dflash_jax.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def drafter(golden):
    return json.loads(golden.path("qwen3", "drafter", "config.json").read_text())


@pytest.fixture
def target(golden):
    return json.loads(golden.path("qwen3", "target", "config.json").read_text())


def _without(config, *names):
    return {k: v for k, v in config.items() if k not in names}


def _nested(config, **changes):
    return config | {"dflash_config": config["dflash_config"] | changes}


def _refused(read, config, *words):
    with pytest.raises(ConfigError) as caught:
        read(config, "some/config.json")
    for word in ("some/config.json", *map(str, words)):
        assert word in str(caught.value)


# RoPE


def test_rope_base_flat_nested_or_both():
    flat = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    nested = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    want = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert RopeConfig.from_hf(flat) == want
    assert RopeConfig.from_hf(nested) == want
    assert RopeConfig.from_hf(flat | nested) == want
    assert RopeConfig.from_hf({"rope_theta": 5e5, "rope_parameters": LLAMA3}) == want
    assert RopeConfig.from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(1e6)
    assert RopeConfig.from_hf({"rope_theta": 1e6}) == RopeConfig(1e6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, ("1000000.0", "10000.0")),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": LLAMA3},
            ("rope_scaling", "yarn", "rope_parameters", "llama3"),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": YARN},
            ("rope_scaling", "default", "rope_parameters", "yarn"),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
            ("factor=4.0", "factor=8.0"),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "original_max_position_embeddings": 7},
            ("original_max_position_embeddings", 7, 4096),
        ),
    ],
)
def test_rope_both_and_different_names_both_values(config, words):
    _refused(RopeConfig.from_hf, config, *words)


def test_rope_none_is_an_error(target, drafter):
    for config, read in ((target, TargetConfig.from_hf), (drafter, DrafterConfig.from_hf)):
        _refused(read, _without(config, "rope_theta", "rope_scaling"), "rope_theta")
    _refused(RopeConfig.from_hf, {"rope_scaling": YARN}, "rope_theta")


def test_rope_type_and_type_are_read_and_unknown_types_refused():
    linear = {"type": "linear", "factor": 2.0}
    assert RopeConfig.from_hf({"rope_theta": 1e4, "rope_scaling": linear}).rope_type == "linear"
    both = linear | {"rope_type": "linear"}
    assert RopeConfig.from_hf({"rope_theta": 1e4, "rope_scaling": both}).factor == 2.0
    different = {"rope_theta": 1e4, "rope_scaling": linear | {"rope_type": "yarn"}}
    _refused(RopeConfig.from_hf, different, "linear", "yarn")
    for unknown in ("dynamic", "longrope", "mrope"):
        scaling = {"rope_type": unknown, "factor": 2.0}
        _refused(RopeConfig.from_hf, {"rope_theta": 1e4, "rope_scaling": scaling}, unknown)


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "default", "factor": 8.0}, "factor"),
        (_without(LLAMA3, "low_freq_factor"), "low_freq_factor"),
        (YARN | {"mrope_section": [1, 2]}, "mrope_section"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_parameters_missing_or_unsupported(scaling, word):
    _refused(RopeConfig.from_hf, {"rope_theta": 1e4, "rope_scaling": scaling}, word)


def test_rope_original_length_defaults_to_the_context_as_in_transformers():
    config = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    rope = RopeConfig.from_hf(config | {"max_position_embeddings": 2048})
    assert rope.original_max_position_embeddings == 2048
    _refused(RopeConfig.from_hf, config, "original_max_position_embeddings")


def test_rope_by_layer_type_only_where_equal():
    inner = {"rope_type": "default", "rope_theta": 1e6}
    same = {"rope_parameters": {"full_attention": inner, "sliding_attention": inner}}
    assert RopeConfig.from_hf(same) == RopeConfig(1e6)
    other = inner | {"rope_theta": 1e4}
    mixed = {"rope_parameters": {"full_attention": inner, "sliding_attention": other}}
    _refused(RopeConfig.from_hf, mixed, "rope_parameters")


# Shapes and layer types


def test_head_dim_from_the_config_where_stated(target):
    assert TargetConfig.from_hf(target).head_dim == 32  # hidden 64 / 4 heads would be 16
    assert TargetConfig.from_hf(_without(target, "head_dim")).head_dim == 16
    odd = _without(target, "head_dim") | {"hidden_size": 66}
    _refused(TargetConfig.from_hf, odd, "head_dim", 66, 4)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_missing_or_absurd_sizes_name_the_field(target, drafter, field):
    for config, read in ((target, TargetConfig.from_hf), (drafter, DrafterConfig.from_hf)):
        _refused(read, _without(config, field), field)
        _refused(read, config | {field: 0}, field, 0)
        _refused(read, config | {field: "8"}, field, "'8'")
        _refused(read, config | {field: float("inf")}, field, "inf")


def test_heads_must_divide_into_groups(target):
    _refused(TargetConfig.from_hf, target | {"num_key_value_heads": 3}, "num_key_value_heads 3", 4)


def test_use_sliding_window_false_with_a_number_is_no_window(drafter, target):
    sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 6}
    on = DrafterConfig.from_hf(drafter | sliding | {"use_sliding_window": True})
    assert [on.window(i) for i in range(3)] == [6, 6, 6]
    off = DrafterConfig.from_hf(drafter | sliding | {"use_sliding_window": False})
    assert [off.window(i) for i in range(3)] == [None] * 3
    assert off.sliding_window is None
    number = target | {"sliding_window": 4096, "use_sliding_window": False}
    assert TargetConfig.from_hf(number) == TargetConfig.from_hf(target)


def test_sliding_layers_come_from_layer_types_or_max_window_layers(golden, target):
    file = golden.path("qwen3_sliding", "drafter", "config.json")
    config = DrafterConfig.from_hf(json.loads(file.read_text()))
    assert [config.window(i) for i in range(3)] == [6, 6, None]
    assert config.sliding_causal
    by_number = target | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}
    read = TargetConfig.from_hf(by_number)
    assert [read.window(i) for i in range(6)] == [None] * 4 + [9, 9]
    _refused(TargetConfig.from_hf, _without(by_number, "max_window_layers"), "max_window_layers")
    _refused(TargetConfig.from_hf, target | {"sliding_window": 9}, "use_sliding_window", 9)
    _refused(TargetConfig.from_hf, _without(by_number, "sliding_window"), "sliding_window")
    short = {"layer_types": ["full_attention"] * 2}
    _refused(TargetConfig.from_hf, target | short, "layer_types", 2, 6)


def test_sliding_window_of_a_mixture_applies_to_all_layers(golden):
    config = json.loads(golden.path("qwen3_moe", "target", "config.json").read_text())
    read = TargetConfig.from_hf(config | {"use_sliding_window": True, "sliding_window": 5})
    assert [read.window(i) for i in range(5)] == [5] * 5


def test_non_causal_sliding_layers_are_stated_in_dflash_config(golden):
    file = golden.path("qwen3_sliding", "drafter", "config.json")
    config = json.loads(file.read_text())
    non_causal = DrafterConfig.from_hf(_nested(config, causal=False))
    assert not non_causal.sliding_causal
    assert DrafterConfig.from_hf(config | {"sliding_window_non_causal": True}) == non_causal
    assert DrafterConfig.from_hf(non_causal.to_hf()) == non_causal
    contradiction = _nested(config, causal=True) | {"sliding_window_non_causal": True}
    _refused(DrafterConfig.from_hf, contradiction, "sliding_window_non_causal")
    _refused(DrafterConfig.from_hf, _nested(config, causal=True), "causal", "full-attention")


# DFlash fields


@pytest.mark.parametrize(
    "name", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"]
)
def test_dflash_fields_from_either_place(drafter, name):
    value = drafter.get(name, drafter["dflash_config"].get(name))
    bare = _without(drafter, name)
    bare["dflash_config"] = _without(bare["dflash_config"], name)
    want = DrafterConfig.from_hf(drafter)
    assert DrafterConfig.from_hf(bare | {name: value}) == want
    assert DrafterConfig.from_hf(_nested(bare, **{name: value})) == want
    assert DrafterConfig.from_hf(_nested(bare, **{name: value}) | {name: value}) == want
    _refused(DrafterConfig.from_hf, bare, name)
    other = [2, 4] if name == "target_layer_ids" else 7
    _refused(DrafterConfig.from_hf, _nested(bare, **{name: value}) | {name: other}, name, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": [1, 6]}, ("target_layer_ids", "[6]", "6")),
        ({"target_layer_ids": [-1, 2]}, ("target_layer_ids", "[-1]")),
        ({"target_layer_ids": [1, 2, 1]}, ("target_layer_ids", "duplicate")),
        ({"target_layer_ids": []}, ("target_layer_ids",)),
        ({"target_layer_ids": "1,2"}, ("target_layer_ids",)),
        ({"mask_token_id": 96}, ("mask_token_id 96", "vocab_size 96")),
        ({"mask_token_id": -1}, ("mask_token_id", "-1")),
    ],
)
def test_taps_and_mask_id_out_of_range_or_duplicate(drafter, changes, words):
    _refused(DrafterConfig.from_hf, _nested(drafter, **changes), *words)


def test_last_layer_may_be_tapped(drafter):
    assert DrafterConfig.from_hf(_nested(drafter, target_layer_ids=[5])).target_layer_ids == (5,)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 32},
        {"target_hidden_size": 128},
        {"shift_label": True},
        {"sample_from_anchor": True},
        {"is_causal": True},
        {"markov_rank": 64},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"model_type": "llama"},
        {"architectures": ["Qwen3DSparkModel"]},
        {"speculators_model_type": "dflash"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"layer_types": ["linear_attention"] * 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_drafters_of_another_layout_are_refused(drafter, changes):
    _refused(DrafterConfig.from_hf, drafter | changes, next(iter(changes)))


@pytest.mark.parametrize("key", ["shift_label", "use_swa", "fc_layernorm", "anything"])
def test_unknown_dflash_config_keys_are_refused_unless_off(drafter, key):
    _refused(DrafterConfig.from_hf, _nested(drafter, **{key: True}), key, "True")
    want = DrafterConfig.from_hf(drafter)
    assert DrafterConfig.from_hf(_nested(drafter, **{key: False})) == want


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("dflash_config", [1], "must be an object"),
        ("dflash_config", "x", "must be an object"),
        ("layer_types", 3, "must be a list"),
        ("layer_types", "full_attention", "must be a list"),
    ],
)
def test_fields_of_another_type_are_named(drafter, field, value, expected):
    _refused(DrafterConfig.from_hf, drafter | {field: value}, field, expected, repr(value))


def test_reduced_vocabulary_field_with_the_full_size_is_accepted(drafter):
    assert DrafterConfig.from_hf(drafter | {"draft_vocab_size": 96}).vocab_size == 96


# Targets


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_next"},
        {"model_type": None},
        {"model_type": ["qwen3"]},
        {"layer_types": 6},
        {"mlp_only_layers": 1, "model_type": "qwen3_moe", "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 8},
        {"hidden_act": "gelu_new"},
        {"partial_rotary_factor": 0.25},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"quantization_config": {"bits": 4}},
        {"linear_num_key_heads": 16},
        {"layer_types": ["full_attention", "linear_attention"] * 3},
        {"attention_bias": "yes"},
    ],
    ids=str,
)
def test_targets_that_compute_something_else_are_refused(target, changes):
    _refused(TargetConfig.from_hf, target | changes, next(iter(changes)))


def test_keys_that_do_not_matter_are_ignored(target, drafter):
    harmless = {
        "auto_map": {"AutoModel": "x.Y"},
        "torch_dtype": "bfloat16",
        "dtype": "float32",
        "transformers_version": "4.51.0",
        "initializer_range": 0.02,
        "use_cache": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pretraining_tp": 1,
        "max_window_layers": 36,
    }
    assert TargetConfig.from_hf(target | harmless) == TargetConfig.from_hf(target)
    assert DrafterConfig.from_hf(drafter | harmless) == DrafterConfig.from_hf(drafter)


def test_mixture_layers_follow_decoder_sparse_step_and_mlp_only_layers(golden):
    config = json.loads(golden.path("qwen3_moe", "target", "config.json").read_text())
    assert TargetConfig.from_hf(config).moe_layers == (True,) * 5
    read = TargetConfig.from_hf(config | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert read.moe_layers == (False, True, False, False, False)
    assert TargetConfig.from_hf(read.to_hf()) == read
    _refused(TargetConfig.from_hf, _without(config, "num_experts"), "num_experts")
    with pytest.raises(ConfigError, match="num_experts_per_tok 9"):
        TargetConfig.from_hf(config | {"num_experts_per_tok": 9})


# Round trips and released sizes

TARGETS = ["smollm2_135m", "qwen3_4b", "qwen3_8b", "qwen3_coder_30b_a3b", "llama31_8b", "tiny"]
DRAFTERS = {
    "qwen3_4b": (1, 9, 17, 25, 33),
    "qwen3_8b": (1, 9, 17, 25, 33),
    "qwen3_coder_30b_a3b": (1, 12, 23, 34, 45),
    "gpt_oss_20b": (1, 6, 11, 16, 21),
    "qwen35_4b": (1, 8, 15, 22, 29),
    "qwen36_27b": (1, 16, 31, 46, 61),
}


@pytest.mark.parametrize("name", TARGETS)
def test_released_targets_round_trip(name):
    config = getattr(TargetConfig, name)()
    assert TargetConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert len({config, config}) == 1  # hashable: configs are static arguments of jit


@pytest.mark.parametrize("name", DRAFTERS)
def test_released_drafters_have_the_published_taps(name):
    config = getattr(DrafterConfig, name)()
    assert config.target_layer_ids == DRAFTERS[name]
    assert default_target_layer_ids(config.num_target_layers, 5) == DRAFTERS[name]
    assert DrafterConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("case", ["qwen3", "llama", "qwen3_moe", "qwen3_sliding"])
def test_drafter_export_states_everything_twice_that_readers_look_for(golden, case):
    source = json.loads(golden.path(case, "drafter", "config.json").read_text())
    config = DrafterConfig.from_hf(source)
    written = config.to_hf()
    assert DrafterConfig.from_hf(written) == config
    assert written["block_size"] == written["dflash_config"]["block_size"] == config.block_size
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == config.rope.theta
    published = {"torch_dtype", "dtype", "auto_map"}
    assert set(source) - published <= set(written)
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    same = set(source) - published - {"dflash_config", "rope_parameters"}
    assert {k: written[k] for k in same} == {k: source[k] for k in same}


def test_scaled_rope_is_written_in_both_forms():
    written = DrafterConfig.gpt_oss_20b().to_hf()
    scaling = written["rope_scaling"]
    assert scaling["rope_type"] == "yarn"
    assert scaling["truncate"] is False
    assert written["rope_parameters"] == {"rope_theta": 1.5e5, **scaling}


def test_new_drafter_takes_the_shape_and_rope_of_its_target():
    target = TargetConfig.llama31_8b()
    config = DrafterConfig.for_target(target, mask_token_id=3, block_size=10, num_layers=2)
    assert (config.hidden_size, config.vocab_size, config.head_dim) == (4096, 128256, 128)
    assert config.rope == target.rope
    assert config.target_layer_ids == (1, 8, 15, 22, 29)
    assert config.num_target_layers == 32
    changed = DrafterConfig.for_target(target, mask_token_id=3, target_layer_ids=(0, 31))
    assert changed.target_layer_ids == (0, 31)


def test_default_taps():
    assert default_target_layer_ids(36, 1) == (18,)
    assert default_target_layer_ids(30, 3) == (1, 14, 27)
    for layers, taps in ((4, 5), (6, 0)):
        with pytest.raises(ConfigError, match="taps"):
            default_target_layer_ids(layers, taps)


def test_lists_become_tuples_so_that_configs_stay_hashable():
    config = DrafterConfig.for_target(
        TargetConfig.tiny(),
        mask_token_id=3,
        num_layers=1,
        target_layer_ids=[1, 3],
        layer_types=["full_attention"],
    )
    assert config.target_layer_ids == (1, 3)
    assert hash(config) == hash(DrafterConfig.from_hf(config.to_hf()))
