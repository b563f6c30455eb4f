"""Model configurations: frozen, hashable, with Hugging Face field names; nothing is guessed."""

import dataclasses
from typing import Any

from dflash_jax.errors import ConfigError
from dflash_jax.hf_fields import DRAFTER_NEUTRAL, Fields
from dflash_jax.model_fields import (
    FULL,
    SLIDING,
    check_shape,
    read_moe,
    read_shape,
    read_sliding_causal,
    shape_to_hf,
)
from dflash_jax.rope_config import RopeConfig

__all__ = ["DrafterConfig", "RopeConfig", "TargetConfig", "default_target_layer_ids"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A Llama, Qwen3 or Qwen3-MoE language model.

    Attributes:
      head_dim: stated in the file; not always hidden_size / num_attention_heads.
      layer_types: "full_attention" or "sliding_attention" per layer; () means all full.
      sliding_window: tokens a sliding layer sees, its own included; None without such layers.
      moe_layers: per layer, whether its MLP is a mixture of experts; () means none.
      moe_intermediate_size: width of one expert.
      norm_topk_prob: renormalise the router's top-k probabilities.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in _ARCHITECTURES:
            raise ConfigError(
                f"model_type {self.model_type!r} is not supported (only {sorted(_ARCHITECTURES)}); "
                "hybrid and recurrent targets cannot roll back a rejected draft"
            )
        check_shape(self)
        moe_layers = tuple(self.moe_layers) or (False,) * self.num_hidden_layers
        object.__setattr__(self, "moe_layers", moe_layers)
        if len(self.moe_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"TargetConfig: moe_layers has {len(self.moe_layers)} entries but "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if any(self.moe_layers) and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"TargetConfig: num_experts_per_tok {self.num_experts_per_tok} must lie in "
                f"1..num_experts = {self.num_experts}"
            )

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head; Llama does not."""
        return self.model_type != "llama"

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_hf(cls, config: dict[str, Any], source: str = "config.json") -> "TargetConfig":
        """Reads a target's `config.json`.

        Raises:
          ConfigError: a field is missing or contradictory, or changes the mathematics in a way
            that is not implemented. Fields that do not matter here are ignored.
        """
        fields = Fields(config, source)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
            raise fields.error(
                f"model_type {model_type!r} is not supported (only {sorted(_ARCHITECTURES)}); "
                "hybrid and recurrent targets cannot roll back a rejected draft"
            )
        fields.refuse_unsupported()
        values = read_shape(fields)
        layers = values["num_hidden_layers"]
        if model_type == "llama" and values["sliding_window"] is not None:
            raise fields.error("sliding_window is not supported for model_type 'llama'")
        if model_type == "qwen3_moe":
            values |= read_moe(fields, layers)
        # Transformers' own default where the key is absent, for all three model types.
        values["tie_word_embeddings"] = fields.flag("tie_word_embeddings", default=False)
        if model_type == "llama":
            values["mlp_bias"] = fields.flag("mlp_bias", default=False)
        try:
            return cls(model_type=model_type, **values)
        except ConfigError as error:
            raise fields.error(str(error)) from None

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back equal."""
        config = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "tie_word_embeddings": self.tie_word_embeddings,
            **shape_to_hf(self),
        }
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.model_type == "qwen3_moe":
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [i for i, moe in enumerate(self.moe_layers) if not moe],
            }
        return config

    @classmethod
    def tiny(cls, model_type: str = "llama", **changes: Any) -> "TargetConfig":
        """A model of a few thousand parameters for tests."""
        values: dict[str, Any] = {
            "vocab_size": 40,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "rope": RopeConfig(theta=1e4),
            "max_position_embeddings": 512,
        }
        if model_type == "qwen3_moe":
            layers = changes.get("num_hidden_layers", values["num_hidden_layers"])
            values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            values |= {"norm_topk_prob": True, "moe_layers": (True,) * layers}
        return cls(model_type=model_type, **(values | changes))

    @classmethod
    def smollm2_135m(cls) -> "TargetConfig":
        """SmolLM2-135M(-Instruct)."""
        return cls(
            *("llama", 49152, 576, 30, 9, 3, 64, 1536, 1e-5, RopeConfig(theta=1e5), 8192),
            tie_word_embeddings=True,
        )

    @classmethod
    def qwen3_4b(cls) -> "TargetConfig":
        """Qwen3-4B."""
        return cls(
            *("qwen3", 151936, 2560, 36, 32, 8, 128, 9728, 1e-6, RopeConfig(theta=1e6), 40960),
            tie_word_embeddings=True,
        )

    @classmethod
    def qwen3_8b(cls) -> "TargetConfig":
        """Qwen3-8B."""
        return cls("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 1e-6, RopeConfig(1e6), 40960)

    @classmethod
    def qwen3_coder_30b_a3b(cls) -> "TargetConfig":
        """Qwen3-Coder-30B-A3B-Instruct: every layer a mixture, 8 of 128 experts."""
        return cls(
            *("qwen3_moe", 151936, 2048, 48, 32, 4, 128, 5472, 1e-6, RopeConfig(1e7), 262144),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            moe_layers=(True,) * 48,
        )

    @classmethod
    def llama31_8b(cls) -> "TargetConfig":
        """Llama-3.1-8B(-Instruct)."""
        rope = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
        return cls("llama", 128256, 4096, 32, 32, 8, 128, 14336, 1e-5, rope, 131072)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers that a NEW drafter taps, evenly spaced (36 layers, 5 taps: 1, 9, 17, 25, 33)."""
    ids: tuple[int, ...] = (num_target_layers // 2,)
    if num_taps != 1:
        step = (num_target_layers - 4) / max(num_taps - 1, 1)
        ids = tuple(round(1 + i * step) for i in range(num_taps))
    if (
        num_taps < 1
        or len(set(ids)) < num_taps
        or not 0 <= min(ids) <= max(ids) < num_target_layers
    ):
        raise ConfigError(f"{num_taps} taps do not fit {num_target_layers} target layers: {ids}")
    return ids


_NESTED_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers"}
_NESTED_KEYS |= {"sliding_window", "causal"}
_OFF = (None, False, 0)  # an unknown key with one of these asks for nothing


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (dflash.md, sections 1 and 4).

    Attributes:
      block_size: slots of a trained block, the anchor included.
      mask_token_id: row of the target's embedding that fills the slots to predict.
      target_layer_ids: tapped target layers, 0-based, in the order `fc` expects.
      num_target_layers: layers of the target that it was trained for.
      layer_types, sliding_window: as in TargetConfig; () means all full.
      sliding_causal: whether sliding layers are causal inside the block. Files say it in
        `dflash_config.causal`, the key that vLLM reads (absent: causal where sliding).
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    sliding_causal: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        check_shape(self)
        fields = Fields(vars(self), "DrafterConfig")
        fields.integer("block_size")
        fields.integer("num_target_layers")
        if fields.integer("mask_token_id", minimum=0) >= self.vocab_size:
            raise fields.error(
                f"mask_token_id {self.mask_token_id} is beyond vocab_size {self.vocab_size}"
            )
        ids = self.target_layer_ids
        outside = [i for i in ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise fields.error(
                f"target_layer_ids {outside} are out of range for num_target_layers "
                f"{self.num_target_layers}"
            )
        if not ids or len(set(ids)) < len(ids):
            raise fields.error(f"target_layer_ids {list(ids)} are empty or contain duplicates")

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_hf(cls, config: dict[str, Any], source: str = "config.json") -> "DrafterConfig":
        """Reads a published drafter's `config.json`; DFlash fields from either place.

        Raises:
          ConfigError: a field is missing, contradictory, out of range or not supported.
        """
        fields = Fields(config, source)
        fields.refuse_unsupported(DRAFTER_NEUTRAL)
        if config.get("model_type", "qwen3") != "qwen3":
            raise fields.error(f"model_type {config['model_type']!r} is not supported (only qwen3)")
        if config.get("architectures", ["DFlashDraftModel"]) != ["DFlashDraftModel"]:
            raise fields.error(
                f"architectures {config['architectures']!r} is not ['DFlashDraftModel']; other "
                "draft models predict from other slots"
            )
        nested = fields.object("dflash_config")
        unknown = sorted(k for k, v in nested.items() if k not in _NESTED_KEYS and v not in _OFF)
        if unknown:
            raise fields.error(
                f"dflash_config.{unknown[0]} = {nested[unknown[0]]!r} is not supported (unknown "
                f"keys {unknown}); it may ask for another prediction layout"
            )
        shape = read_shape(fields)
        for name, expected in (
            ("draft_vocab_size", shape["vocab_size"]),
            ("target_hidden_size", shape["hidden_size"]),
        ):
            if config.get(name) not in (None, expected):
                raise fields.error(
                    f"{name} {config[name]!r} differs from {expected}: not supported"
                )
        ids = fields.either("target_layer_ids", "dflash_config")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise fields.error(f"target_layer_ids must be a list of layer numbers, got {ids!r}")
        values: dict[str, Any] = {
            name: fields.as_integer(name, fields.either(name, "dflash_config"), minimum=minimum)
            for name, minimum in (("block_size", 1), ("mask_token_id", 0), ("num_target_layers", 1))
        }
        try:
            return cls(
                target_layer_ids=tuple(ids),
                sliding_causal=read_sliding_causal(fields, shape["layer_types"]),
                **values,
                **shape,
            )
        except ConfigError as error:
            raise fields.error(str(error)) from None

    def to_hf(self) -> dict[str, Any]:
        """The published form: `block_size` in both places and RoPE in both forms."""
        nested: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if not self.sliding_causal:
            nested["causal"] = False
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": nested,
            "num_target_layers": self.num_target_layers,
            "tie_word_embeddings": False,
            **shape_to_hf(self),
        }

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        mask_token_id: int,
        num_layers: int = 5,
        num_taps: int = 5,
        block_size: int = 16,
        **changes: Any,
    ) -> "DrafterConfig":
        """A new drafter with the target's attention shape and RoPE; `changes` replace any field."""
        names = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
        names += ["intermediate_size", "vocab_size", "rms_norm_eps", "rope"]
        names += ["max_position_embeddings", "attention_bias"]
        values: dict[str, Any] = {name: getattr(target, name) for name in names}
        values |= {
            "num_hidden_layers": num_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "num_target_layers": target.num_hidden_layers,
        }
        if "target_layer_ids" not in changes:
            values["target_layer_ids"] = default_target_layer_ids(
                target.num_hidden_layers, num_taps
            )
        return cls(**(values | changes))

    # Released drafters; LLaMA3.1-8B's mask id and MLP width are stated in its own file only.

    @classmethod
    def qwen3_4b(cls) -> "DrafterConfig":
        """Qwen3-4B-DFlash-b16."""
        return cls.for_target(TargetConfig.qwen3_4b(), mask_token_id=151669)

    @classmethod
    def qwen3_8b(cls) -> "DrafterConfig":
        """Qwen3-8B-DFlash-b16."""
        return cls.for_target(TargetConfig.qwen3_8b(), mask_token_id=151669)

    @classmethod
    def qwen3_coder_30b_a3b(cls) -> "DrafterConfig":
        """Qwen3-Coder-30B-A3B-DFlash."""
        target = TargetConfig.qwen3_coder_30b_a3b()
        changes = {"num_layers": 8, "intermediate_size": 6144}
        return cls.for_target(target, mask_token_id=151669, **changes)

    @classmethod
    def gpt_oss_20b(cls) -> "DrafterConfig":
        """gpt-oss-20b-DFlash: attention biases, YaRN x32 (range as in the target's file)."""
        rope = RopeConfig(
            1.5e5, "yarn", 32.0, original_max_position_embeddings=4096, truncate=False
        )
        return cls(
            *(2880, 8, 64, 8, 64, 7680, 201088, 1e-5, rope, 131072),
            *(8, 200000, default_target_layer_ids(24, 5), 24),
            attention_bias=True,
        )

    @classmethod
    def qwen35_4b(cls) -> "DrafterConfig":
        """Qwen3.5-4B-DFlash."""
        return cls(
            *(2560, 5, 32, 8, 128, 9728, 248320, 1e-6, RopeConfig(1e7), 262144),
            *(16, 248070, default_target_layer_ids(32, 5), 32),
        )

    @classmethod
    def qwen36_27b(cls) -> "DrafterConfig":
        """Qwen3.6-27B-DFlash: four sliding layers and a full one."""
        return cls(
            *(5120, 5, 32, 8, 128, 17408, 248320, 1e-6, RopeConfig(1e7), 262144),
            *(16, 248070, default_target_layer_ids(64, 5), 64),
            layer_types=(SLIDING,) * 4 + (FULL,),
            sliding_window=2048,
        )
