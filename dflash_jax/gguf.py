"""Llama-architecture GGUF files: metadata -> config, dequantised tensors, tokenizer.

Format: the llama.cpp GGUF specification. Quantised blocks are dequantised once, at load.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.errors import ConfigError, WeightsError
from dflash_jax.rope import inverse_frequencies

# GGUF tensor names -> the Hugging Face names of `weights.target_table`.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
# Metadata of `llama.*` that is read here or does not change the computation.
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"),
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Reader(GGUFReader):
    """Holds the mapped file as a plain array: numpy's memmap class doubles the time to read it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class GGUFFile:
    """A GGUF file as a `weights.TensorSource` under Hugging Face names, with its metadata.

    Raises:
      ConfigError: another architecture, or metadata that is missing or not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
        except (ValueError, IndexError, KeyError) as error:
            size = path.stat().st_size
            raise ConfigError(
                f"{path}: not a readable GGUF file, or one cut short at {size} bytes: {error}"
            ) from error
        self.metadata: dict[str, Any] = {
            # Arrays of scalars come back whole; the two counts and the version are not needed.
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and field.types[0] in GGUFValueType
        }
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ConfigError(
                f"{path}: general.architecture {architecture!r} is not supported (only 'llama')"
            )
        self._tensors: dict[str, ReaderTensor] = {}
        self._rope_factors: np.ndarray | None = None
        for tensor in reader.tensors:
            if tensor.name == _ROPE_FREQS:
                self._rope_factors = np.asarray(tensor.data, np.float32)
            else:
                self._tensors[_hugging_face_name(tensor.name)] = tensor
        self.config = self._read_config()

    def _get(self, key: str) -> Any:
        value = self.metadata.get(f"llama.{key}")
        if value is None:
            raise ConfigError(f"{self.path}: llama.{key} is missing")
        return value

    def _read_config(self) -> TargetConfig:
        meta, get = self.metadata, self._get
        unknown = sorted(
            key
            for key in meta
            if key.startswith("llama.") and key.removeprefix("llama.") not in _KNOWN
        )
        if unknown:
            raise ConfigError(
                f"{self.path}: {unknown[0]} = {meta[unknown[0]]!r} is not supported "
                f"(unknown keys {unknown})"
            )
        heads, hidden = get("attention.head_count"), get("embedding_length")
        if not isinstance(heads, int):
            raise ConfigError(f"{self.path}: llama.attention.head_count differs by layer: {heads}")
        head_dim = meta.get("llama.attention.key_length", hidden // heads)
        if "model.embed_tokens.weight" not in self._tensors:
            raise WeightsError(f"{self.path}: token_embd.weight is missing")
        vocab_size = self.shape("model.embed_tokens.weight")[0]
        for key, expected in (
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("vocab_size", vocab_size),
        ):
            if meta.get(f"llama.{key}", expected) != expected:
                raise ConfigError(f"{self.path}: llama.{key} is {get(key)}, expected {expected}")
        biased = [name for name in self._tensors if name.endswith("_proj.bias")]
        values = {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            # The specification's default: without this key, no grouped-query attention.
            "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": get("feed_forward_length"),
            "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
            "rope": self._read_rope(head_dim),
            "max_position_embeddings": get("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": any("self_attn" in name for name in biased),
            "mlp_bias": any(".mlp." in name for name in biased),
        }
        try:
            return TargetConfig(model_type="llama", **values)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _read_rope(self, head_dim: int) -> RopeConfig:
        theta = _shortest(self._get("rope.freq_base"))
        scaling = self.metadata.get("llama.rope.scaling.type", "none")
        if self._rope_factors is not None:
            if scaling != "none":
                raise ConfigError(f"{self.path}: {_ROPE_FREQS} beside scaling type {scaling!r}")
            return self._llama3_rope(theta, head_dim, self._rope_factors)
        if scaling == "none":
            return RopeConfig(theta)
        if scaling == "linear":
            return RopeConfig(theta, "linear", _shortest(self._get("rope.scaling.factor")))
        raise ConfigError(
            f"{self.path}: llama.rope.scaling.type {scaling!r} is not supported "
            "(only none, linear, and the rope_freqs tensor of Llama 3)"
        )

    def _llama3_rope(self, theta: float, head_dim: int, factors: np.ndarray) -> RopeConfig:
        """The llama3 parameters behind the stored divisors of the frequencies.

        The file keeps only the result. All Llama 3.x models use bands 1 and 4 of a context of
        8192; other parameters would give other divisors and are refused.
        """
        rope = RopeConfig(theta, "llama3", float(factors.max()), 1.0, 4.0, 8192)
        plain, _ = inverse_frequencies(RopeConfig(theta), head_dim)
        scaled, _ = inverse_frequencies(rope, head_dim)
        if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-5):
            raise ConfigError(
                f"{self.path}: {_ROPE_FREQS} does not hold the llama3 divisors of factor "
                f"{rope.factor}, bands 1 and 4, context 8192"
            )
        return rope

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence, end-of-turn and end-of-message ids that the file states."""
        stated = (self.metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS)
        return tuple(dict.fromkeys(int(i) for i in stated if i is not None))

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def where(self, name: str) -> str:
        return f"{self.path}: {self._tensors[name].name}"

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32, rows of q and k in Hugging Face order."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise WeightsError(f"{self.where(name)}: {error}") from error
        values = values.reshape(self.shape(name))
        if ".q_proj." in name:
            return unpermute(values, self.config.num_attention_heads)
        if ".k_proj." in name:
            return unpermute(values, self.config.num_key_value_heads)
        return values


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [N*H, ...] of interleaved RoPE pairs (llama.cpp) -> halves (rotate-half).

    llama.cpp stores channel j and j + H/2 of a head next to each other.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _shortest(value: float) -> float:
    """GGUF stores float32: 9.999999747378752e-06 was 1e-05. Shortest decimal of that float32."""
    return float(str(np.float32(value)))
