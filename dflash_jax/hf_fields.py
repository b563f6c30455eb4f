"""Read a Hugging Face `config.json`: typed fields, unsupported mathematics refused."""

import math
from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import ConfigError

# Fields that change the computation, with the values that leave it as implemented here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "partial_rotary_factor": (1,),
    "rope_interleave": (False,),
    "qk_layernorm": (True,),
    "use_qk_norm": (True,),
    "qkv_bias": (False,),
    "clip_qkv": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "attention_sink_bias": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "use_parallel_residual": (False,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "quantization_config": (),
    # recurrent or hybrid layers: their state cannot be rolled back after a rejection
    "linear_num_key_heads": (0,),
    "linear_conv_kernel_dim": (0,),
    "full_attention_interval": (1,),
    "attn_layer_indices": (),
    "mamba_d_state": (0,),
    "ssm_cfg": (),
    "layers_block_type": (),
    "hybrid_override_pattern": (),
    # nested models of several modalities
    "text_config": (),
    "vision_config": (),
}

# Fields of draft models with another prediction layout or other parts, with their neutral values.
DRAFTER_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "shift_label": (False,),
    "sample_from_anchor": (False,),
    "markov_rank": (0,),
    "pure_draft_prefix_len": (1,),
    "speculators_model_type": (),
    "transformer_layer_config": (),
}


class Fields:
    """Typed access to one config dict; every error names `source`, the field and its value."""

    def __init__(self, config: Mapping[str, Any], source: str):
        if not isinstance(config, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, got {type(config).__name__}")
        self.config = config
        self.source = source

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.source}: {message}")

    def get(self, name: str) -> Any:
        return self.config.get(name)

    def _required(self, name: str, value: Any) -> Any:
        if value is None:
            raise self.error(f"{name} is missing")
        return value

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """An integer field; `default` only where the format itself defines one for absence."""
        value = self.get(name)
        return self.as_integer(name, default if value is None else value, minimum=minimum)

    def as_integer(self, name: str, value: Any, *, minimum: int) -> int:
        value = self._required(name, value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{name} must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self._required(name, self.get(name))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self.error(f"{name} must be a positive, finite number, got {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """A nested object; {} where it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, got {value!r}")
        return value or {}

    def either(self, name: str, nested: str) -> Any:
        """The value of `name` at top level or inside the object `nested`; both must agree."""
        inner = self.object(nested)
        outer_value, inner_value = self.get(name), inner.get(name)
        if outer_value is not None and inner_value is not None and outer_value != inner_value:
            raise self.error(
                f"{name} is {outer_value!r} at top level but {inner_value!r} in {nested}"
            )
        return inner_value if outer_value is None else outer_value

    def refuse_unsupported(self, more: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Raise on fields that change the computation in a way that is not implemented.

        Args:
          more: further fields with their harmless values, beyond the common ones.
        """
        for name, neutral in {**_NEUTRAL, **(more or {})}.items():
            value = self.get(name)
            if value is not None and value not in neutral:
                expected = " or ".join(map(repr, neutral)) or "absent"
                raise self.error(f"{name} = {value!r} is not supported (only {expected})")

    def layer_windows(self, num_layers: int) -> tuple[tuple[str, ...], int | None]:
        """Per-layer attention types and the sliding window in tokens (None: no sliding layer).

        `use_sliding_window: false` switches the window off whatever number or types are present.
        Without `layer_types`, Qwen3 slides the layers from `max_window_layers` on and Qwen3-MoE
        all of them.
        """
        use, types = self.get("use_sliding_window"), self.get("layer_types")
        window = self.either("sliding_window", "dflash_config")
        if use is not None and not isinstance(use, bool):
            raise self.error(f"use_sliding_window must be true or false, got {use!r}")
        if types is not None:
            if not isinstance(types, list | tuple):
                raise self.error(f"layer_types must be a list, got {types!r}")
            if len(types) != num_layers:
                raise self.error(
                    f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}"
                )
            unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
            if unknown:
                raise self.error(
                    f"layer_types contains {unknown}: recurrent, chunked or other layers are not "
                    "supported (only full_attention and sliding_attention)"
                )
        full = ("full_attention",) * num_layers
        if use is False:
            return full, None
        if types is None:
            if use is None:
                if window is not None:
                    raise self.error(
                        f"sliding_window is {window!r} but neither use_sliding_window nor "
                        "layer_types says which layers slide"
                    )
                return full, None
            every = self.get("model_type") == "qwen3_moe"
            first = 0 if every else self.integer("max_window_layers", minimum=0)
            types = [full[0] if i < first else "sliding_attention" for i in range(num_layers)]
        if "sliding_attention" not in types:
            return full, None
        return tuple(types), self.as_integer("sliding_window", window, minimum=1)
