"""Fields that targets and drafters share: read, checked, written."""

from typing import Any

from dflash_jax.hf_fields import Fields
from dflash_jax.rope_config import RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


def check_shape(config: Any) -> None:
    fields = Fields(vars(config), type(config).__name__)
    for name in _SIZES:
        fields.integer(name)
    if config.num_attention_heads % config.num_key_value_heads:
        raise fields.error(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise fields.error(f"head_dim {config.head_dim} must be even for RoPE")
    # Tuples even where run configs hold lists: configs are static arguments of jit.
    layer_types = tuple(config.layer_types) or (FULL,) * config.num_hidden_layers
    object.__setattr__(config, "layer_types", layer_types)
    if len(config.layer_types) != config.num_hidden_layers:
        raise fields.error(
            f"layer_types has {len(config.layer_types)} entries but num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    if (SLIDING in config.layer_types) != (config.sliding_window is not None):
        raise fields.error(
            f"sliding_window {config.sliding_window} does not fit layer_types {config.layer_types}"
        )


def read_shape(fields: Fields) -> dict[str, Any]:
    """What targets and drafters share."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error(
            f"head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    layers = fields.integer("num_hidden_layers")
    layer_types, window = fields.layer_windows(layers)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # Both defaults are those of the format: older files leave the fields out.
        "num_key_value_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.integer("head_dim", default=hidden // heads),
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": RopeConfig.from_hf(dict(fields.config), fields.source),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "attention_bias": fields.flag("attention_bias", default=False),
        "layer_types": layer_types,
        "sliding_window": window,
    }


def shape_to_hf(config: Any) -> dict[str, Any]:
    names = [*_SIZES, "rms_norm_eps", "attention_bias", "sliding_window"]
    return {
        **{name: getattr(config, name) for name in names},
        "hidden_act": "silu",
        **config.rope.to_hf(),
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
    }


def read_moe(fields: Fields, num_layers: int) -> dict[str, Any]:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error(f"mlp_only_layers must be a list of layer numbers, got {dense!r}")
    return {
        "num_experts": fields.integer("num_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    }


def read_sliding_causal(fields: Fields, layer_types: tuple[str, ...]) -> bool:
    """`dflash_config.causal` (vLLM) or `sliding_window_non_causal` (speculators)."""
    causal = fields.object("dflash_config").get("causal")
    other = fields.get("sliding_window_non_causal")
    for name, value in (("dflash_config.causal", causal), ("sliding_window_non_causal", other)):
        if value not in (None, True, False):
            raise fields.error(f"{name} must be true or false, got {value!r}")
    if causal is not None and other is not None and causal == other:
        raise fields.error(
            f"dflash_config.causal = {causal} contradicts sliding_window_non_causal = {other}"
        )
    if causal and FULL in layer_types:
        raise fields.error(
            "dflash_config.causal = true with full-attention layers is not supported"
        )
    return not other if causal is None else causal
