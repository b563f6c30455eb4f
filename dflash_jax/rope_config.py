"""Rotary embedding parameters, read from the flat and the nested form of `config.json`."""

import dataclasses
from typing import Any

from dflash_jax.hf_fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Parameters of Transformers' `modeling_rope_utils`, field for field.

    Attributes:
      theta: base of the geometric series of wavelengths.
      rope_type: "default", "linear", "llama3" or "yarn".
      factor: context extension factor (all types but default).
      low_freq_factor, high_freq_factor: band limits of llama3.
      original_max_position_embeddings: trained context of llama3 and yarn.
      attention_factor: multiplies cos and sin (yarn); None means derived from factor.
      beta_fast, beta_slow: correction range of yarn; None means 32 and 1.
      mscale, mscale_all_dim: yarn attention factor as a ratio, where both are set.
      truncate: yarn rounds its correction range to whole dimensions.
    """

    theta: float
    rope_type: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        fields = Fields(dataclasses.asdict(self), "RopeConfig")
        fields.number("theta")
        if self.rope_type not in ROPE_TYPES:
            raise fields.error(f"rope_type {self.rope_type!r} is not one of {ROPE_TYPES}")
        for name in _REQUIRED[self.rope_type]:
            fields.number(name)

    @classmethod
    def from_hf(cls, config: dict[str, Any], source: str = "config.json") -> "RopeConfig":
        """Reads `rope_theta` + `rope_scaling`, or `rope_parameters`, or both where they agree.

        Raises:
          ConfigError: nothing stated, forms that disagree, an unknown type or parameter.
        """
        fields = Fields(config, source)
        theta = _agreed(
            fields,
            "rope_theta",
            {
                "rope_theta": config.get("rope_theta"),
                "rope_scaling.rope_theta": _object(fields, "rope_scaling").get("rope_theta"),
                "rope_parameters.rope_theta": _object(fields, "rope_parameters").get("rope_theta"),
            },
        )
        if theta is None:
            raise fields.error(
                "the RoPE base is missing: neither rope_theta nor rope_parameters.rope_theta"
            )
        forms: dict[str, RopeConfig] = {}
        for name in ("rope_scaling", "rope_parameters"):
            if config.get(name) is not None:
                forms[name] = _parse(fields, theta, name)
            elif name == "rope_scaling" and name in config and "rope_theta" in config:
                forms[name] = cls(theta=_number(fields, "rope_theta", theta))  # null: no scaling
        if not forms:
            return cls(theta=_number(fields, "rope_theta", theta))
        return _agreed(fields, "RoPE", forms)

    def to_hf(self) -> dict[str, Any]:
        """Both published forms at once: readers look at only one of them."""
        used = _REQUIRED[self.rope_type] + _OPTIONAL.get(self.rope_type, ())
        values = {name: getattr(self, name) for name in used}
        scaling = {"rope_type": self.rope_type}
        scaling |= {name: value for name, value in values.items() if value is not None}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.rope_type == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **scaling},
        }


def _object(fields: Fields, name: str) -> dict[str, Any]:
    """The RoPE object under `name`; one per layer type is accepted where all are equal."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.error(f"{name} must be an object, got {value!r}")
    if value and all(isinstance(inner, dict) for inner in value.values()):
        inners = list(value.values())
        if any(inner != inners[0] for inner in inners):
            raise fields.error(f"{name} differs by layer type, which is not supported: {value}")
        return inners[0]
    return value


def _number(fields: Fields, name: str, value: Any) -> float:
    return Fields({name: value}, fields.source).number(name)


def _agreed(fields: Fields, name: str, forms: dict[str, Any]) -> Any:
    stated = {where: value for where, value in forms.items() if value is not None}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        listing = " but ".join(f"{where} says {value}" for where, value in stated.items())
        raise fields.error(f"{name} is stated twice and differs: {listing}")
    return values[0] if values else None


def _parse(fields: Fields, theta: Any, name: str) -> RopeConfig:
    given = {k: v for k, v in _object(fields, name).items() if v is not None and k != "rope_theta"}
    types: dict[str, Any] = {k: given.pop(k) for k in ("rope_type", "type") if k in given}
    rope_type = _agreed(fields, f"{name} type", types) or "default"
    if rope_type not in ROPE_TYPES:
        raise fields.error(f"{name} type {rope_type!r} is not supported (only {ROPE_TYPES})")
    if given.pop("partial_rotary_factor", 1) != 1:
        raise fields.error(f"{name}.partial_rotary_factor other than 1 is not supported")
    original = "original_max_position_embeddings"
    if original in _REQUIRED[rope_type]:
        # As Transformers: a top-level value first, the trained length being the default.
        outer = fields.get(original)
        inner = given.get(original)
        stated = _agreed(fields, original, {"top level": outer, name: inner})
        given[original] = fields.get("max_position_embeddings") if stated is None else stated
    else:
        given.pop(original, None)  # informative only for these types
    required, optional = _REQUIRED[rope_type], _OPTIONAL.get(rope_type, ())
    unknown = sorted(set(given) - set(required) - set(optional))
    if unknown:
        raise fields.error(f"{name} of type {rope_type!r} has unsupported parameters {unknown}")
    inner_fields = Fields(given, f"{fields.source}: {name}")
    values: dict[str, Any] = {key: inner_fields.number(key) for key in required}
    if original in values:
        values[original] = inner_fields.integer(original)
    for key in optional:
        # Transformers treats a zero as absent, except for the attention factor.
        if key != "truncate" and (given.get(key) or (key == "attention_factor" and key in given)):
            values[key] = inner_fields.number(key)
    if "truncate" in given:
        values["truncate"] = inner_fields.flag("truncate", default=True)
    return RopeConfig(theta=_number(fields, "rope_theta", theta), rope_type=rope_type, **values)
