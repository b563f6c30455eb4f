"""GGUF: metadata, the row order of q and k, dequantisation, and the tokenizer inside."""

import gguf
import jax
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError, LoadError, WeightsError
from dflash_jax.gguf import GGUFFile, unpermute
from dflash_jax.loading import load_target
from dflash_jax.rope import inverse_frequencies
from dflash_jax.target import target_forward

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CONFIG = TargetConfig.tiny(
    vocab_size=264, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


def _byte_tokens():
    """The 256 byte symbols of GPT-2, two merges, and control tokens."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    symbols = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}
    tokens = [symbols[b] for b in range(256)]
    return [*tokens, "he", "ll", "hell", "<s>", "</s>", "<eot>", "<tool>", "<mask>"]


def _permute(rows, heads):
    """llama.cpp's own conversion, written down independently of ours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_weights(config, seed=0, untied=True):
    module = LlamaForCausalLM(
        LlamaConfig(
            **{
                name: getattr(config, name)
                for name in (
                    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
                    *("num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps"),
                )
            },
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=not untied,
            attn_implementation="eager",
        )
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _write(path, module, config=CONFIG, *, arch="llama", extra=(), tensors=(), quantise=None):
    """A GGUF file as llama.cpp's converter lays it out."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = _byte_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 259 + [3] * 5)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_eot_token_id(tokens.index("<eot>"))
    writer.add_chat_template(TEMPLATE)
    for method, *arguments in extra:
        getattr(writer, method)(*arguments)
    for name, tensor in module.state_dict().items():
        values, name = tensor.numpy(), name.removeprefix("model.")
        if "q_proj" in name:
            values = _permute(values, config.num_attention_heads)
        if "k_proj" in name:
            values = _permute(values, config.num_key_value_heads)
        for theirs, ours in (
            ("embed_tokens", "token_embd"),
            ("lm_head", "output"),
            *(("norm", "output_norm"),) * (name == "norm.weight"),
            *NAMES.items(),
        ):
            name = name.replace(theirs, ours)
        name = name.replace("layers.", "blk.")
        if name == "output.weight" and module.config.tie_word_embeddings:
            continue
        if quantise is not None and values.ndim == 2:
            raw = gguf.quants.quantize(values, quantise)
            writer.add_tensor(name, raw, raw_dtype=quantise)
        else:
            writer.add_tensor(name, values)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def untied():
    return _hugging_face_weights(CONFIG)


TOKENS = np.random.default_rng(0).integers(0, 264, (1, 12))


def _theirs(module):
    with torch.no_grad():
        return module(torch.from_numpy(TOKENS)).logits.numpy()


def test_rows_of_q_and_k_are_put_back_in_order():
    rows = np.arange(4 * 16 * 3, dtype=np.float32).reshape(64, 3)
    permuted = _permute(rows, 4)
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(unpermute(permuted, 4), rows)


def test_untied_file_equals_transformers(tmp_path, untied):
    target = load_target(_write(tmp_path / "m.gguf", untied))
    assert target.config == CONFIG
    logits, _ = target_forward(target, TOKENS)
    # Float32 logits of magnitude 10; measured 1e-5.
    np.testing.assert_allclose(logits, _theirs(untied), atol=1e-4)


def test_tied_file_has_no_head_of_its_own(tmp_path):
    module = _hugging_face_weights(CONFIG, seed=1, untied=False)
    target = load_target(_write(tmp_path / "m.gguf", module))
    assert target.config.tie_word_embeddings
    assert "lm_head" not in target.params
    np.testing.assert_allclose(target_forward(target, TOKENS)[0], _theirs(module), atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_blocks_are_dequantised_once(tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    config = TargetConfig.tiny(
        vocab_size=264, num_hidden_layers=1, hidden_size=64, intermediate_size=64, head_dim=16
    )
    module = _hugging_face_weights(config)
    path = _write(tmp_path / "m.gguf", module, config, quantise=quantisation)
    target = load_target(path)
    embedding = module.model.embed_tokens.weight.detach().numpy()
    want = gguf.quants.dequantize(gguf.quants.quantize(embedding, quantisation), quantisation)
    np.testing.assert_array_equal(target.params["embed"]["embedding"], want)
    step = {"Q8_0": 0.01, "Q4_1": 0.1, "F16": 1e-3}[kind]
    q = module.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    kernel = target.params["layers_0"]["attention"]["qkv"]["kernel"][:, :2]
    np.testing.assert_allclose(kernel.reshape(64, 64), q, atol=step)


def test_stop_ids_tokenizer_and_chat_template_come_from_the_metadata(tmp_path, untied):
    target = load_target(_write(tmp_path / "m.gguf", untied))
    assert target.stop_token_ids == (260, 261)
    tokenizer = target.tokenizer
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.bos_token_id == 259
    assert len(tokenizer) == 264
    ids = tokenizer("<s>hello 12\u00e9</s>").input_ids
    assert ids[:3] == [259, 258, ord("o")]  # "hell", "o"
    assert ids[-1] == 260
    assert tokenizer.decode(ids) == "<s>hello 12\u00e9</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello 12\u00e9"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>hi"


def test_first_token_is_added_where_the_file_says_so(tmp_path, untied):
    path = _write(tmp_path / "m.gguf", untied, extra=[("add_add_bos_token", True)])
    assert load_target(path).tokenizer("he").input_ids == [259, 256]


def test_linear_scaling_is_read(tmp_path, untied):
    extra = [
        ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 4.0),
    ]
    rope = GGUFFile(_write(tmp_path / "m.gguf", untied, extra=extra)).config.rope
    assert rope == RopeConfig(CONFIG.rope.theta, "linear", 4.0)


def test_llama3_divisors_are_recognised_or_refused(tmp_path, untied):
    theta, head_dim = CONFIG.rope.theta, CONFIG.head_dim
    want = RopeConfig(theta, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, _ = inverse_frequencies(RopeConfig(theta), head_dim)
    factors = plain / inverse_frequencies(want, head_dim)[0]
    path = _write(tmp_path / "m.gguf", untied, tensors=[("rope_freqs.weight", factors)])
    assert GGUFFile(path).config.rope == want
    factors[3] *= 1.5
    path = _write(tmp_path / "n.gguf", untied, tensors=[("rope_freqs.weight", factors)])
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ([("add_rope_scaling_type", gguf.RopeScalingType.YARN)], "yarn"),
        ([("add_expert_count", 8)], "expert_count"),
        ([("add_sliding_window", 128)], "sliding_window"),
        ([("add_logit_scale", 0.5)], "logit_scale"),
        ([("add_vocab_size", 300)], "vocab_size is 300, expected 264"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused(tmp_path, untied, extra, word):
    with pytest.raises(ConfigError, match=word):
        GGUFFile(_write(tmp_path / "m.gguf", untied, extra=extra))


def test_other_architectures_and_files_are_refused(tmp_path, untied):
    with pytest.raises(ConfigError, match=r"general\.architecture 'qwen2'"):
        GGUFFile(_write(tmp_path / "m.gguf", untied, arch="qwen2"))
    (tmp_path / "text.gguf").write_text("no GGUF file at all, only text")
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        GGUFFile(tmp_path / "text.gguf")


def test_unknown_tensors_and_tokenizers_are_refused(tmp_path, untied):
    extra = [("blk.0.attn_sinks.weight", np.ones(4, np.float32))]
    with pytest.raises(WeightsError, match=r"unexpected.*attn_sinks"):
        load_target(_write(tmp_path / "m.gguf", untied, tensors=extra))
    path = _write(tmp_path / "n.gguf", untied, extra=[("add_string", "x", "y")])
    metadata = GGUFFile(path).metadata | {"tokenizer.ggml.pre": "klingon"}
    from dflash_jax.gguf_tokenizer import load_tokenizer

    with pytest.raises(LoadError, match="klingon"):
        load_tokenizer(metadata, path, 512)


# The real file


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_target("smollm2-135m-instruct")


def test_smollm2_config_and_stop_ids(smollm2):
    assert smollm2.config == TargetConfig.smollm2_135m()
    assert smollm2.stop_token_ids == (2,)
    leaves = jax.tree.leaves(smollm2.params)
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    assert all(bool(np.isfinite(leaf).all()) for leaf in leaves)


TEXTS = [
    "<|im_start|>user\nHello  world, h\u00e9llo 123\n\tx<|im_end|>",
    "def f(x):\n    return x**2  # 3.14159\r\n\r\n",
    " leading space, I'll they've WE'RE don't",
    "\u65e5\u672c\u8a9e \U0001f642\U0001f44d\U0001f3fd a\u00a0b  c   d",
    "<empty_output>x<repo_name>y 12345 67,890.12 <|im_end",
    "   \n\n  \t",
]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_text_round_trips(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text


def test_smollm2_tokenizer_equals_the_one_of_transformers(smollm2, smollm2_gguf):
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    ours = smollm2.tokenizer
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    assert len(ours) == len(theirs) == 49152
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours.convert_tokens_to_ids("<empty_output>") == 16
    messages = [{"role": "user", "content": "hi"}]
    rendered = [
        t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for t in (ours, theirs)
    ]
    assert rendered[0] == rendered[1]
    assert rendered[0].endswith("<|im_start|>assistant\n")


def test_smollm2_answers(smollm2):
    ids = smollm2.tokenizer("The capital of France is").input_ids
    logits, _ = target_forward(smollm2, np.array([ids]))
    assert smollm2.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
