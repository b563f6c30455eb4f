"""Run configs (`ml_collections.ConfigDict`) as checked, frozen dataclasses.

The defaults live in `configs/common.py` alone: here every key is required, unknown ones are
refused, and each error names the file, the field and the values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from dflash_jax.errors import ConfigError

S = TypeVar("S")


def _field(
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its allowed range: bounds are inclusive, `above`/`below` are not."""
    limits = {
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "choices": choices,
    }
    return dataclasses.field(metadata=limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The frozen target.

    Attributes:
      path: Hugging Face folder, hub id, .gguf file or alias; "tiny" = a small seeded random model.
      dtype: "auto" (float32 on a CPU, bfloat16 elsewhere), "float32" or "bfloat16".
      seed: of the "tiny" model.
    """

    path: str
    dtype: str = _field(choices=("auto", "float32", "bfloat16"))
    seed: int = _field(minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """The drafter to train; attention shape, MLP width and RoPE are the target's.

    Attributes:
      num_layers: draft layers; 0 = as the file of `warm_start` has it, from which a stated number
        must not differ. So with the next ones.
      num_taps: tapped target layers, evenly spaced; ignored where target_layer_ids are given.
      target_layer_ids: the taps themselves, 0-based; () = by num_taps.
      block_size: slots of a block, the anchor included; 0 as above.
      mask_token_id: row of the target's embedding that no text uses; -1 = not stated.
      warm_start: folder or hub id of a published drafter to go on from; "" = a fresh one.
      init: of a fresh one: "target", layers copied from the target (dflash_jax/drafter_init.py), or
        "random".
      features: False trains without the target's hidden states, zeros in their place: an ablation.
      dtype: of the computation; parameters and their optimizer state are float32.
    """

    num_layers: int = _field(minimum=0)
    num_taps: int = _field(minimum=0)
    target_layer_ids: tuple[int, ...] = _field(minimum=0)
    block_size: int = _field(minimum=0)
    mask_token_id: int = _field(minimum=-1)
    warm_start: str
    init: str = _field(choices=("random", "target"))
    features: bool
    dtype: str = _field(choices=("auto", "float32", "bfloat16"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Files and batches.

    Attributes:
      train: files or aliases of conversations or regenerated rows (train/data.py), packed or not.
      eval: files to evaluate on, without a prompt of `train`; () = the held-out part of `train`.
      held_out_fraction: share of the prompts of `train` that is not trained on.
      max_length: tokens a row; longer ones are cut.
      batch_size: rows a step, over all hosts and devices.
      enable_thinking: for the chat template; None = the template's default.
      on_truncation: "error" or "keep" (the good records) for broken files.
      loops: what becomes of responses in `train` that end in a loop (train/repetition.py): "keep",
        "cut" after its first period, or "drop". Cutting keeps the text before the loop and none of
        the copying. Rows to evaluate on stay as they are; their loops are reported apart.
      regenerated_by: the target's name that regenerated rows must state; "" = `target.path`.
      limit: rows to read at most; 0 = all.
    """

    train: tuple[str, ...]
    eval: tuple[str, ...]
    held_out_fraction: float = _field(minimum=0, below=1)
    max_length: int = _field(minimum=2)
    batch_size: int = _field(minimum=1)
    enable_thinking: bool | None
    on_truncation: str = _field(choices=("error", "keep"))
    loops: str = _field(choices=("keep", "cut", "drop"))
    regenerated_by: str
    limit: int = _field(minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    """Rows that the target itself writes at the start, in place of files (kept in the workdir).

    Attributes:
      rows: prompts of random ids; 0 = off, use `data.train`.
      prompt_length, response_length: tokens.
      temperature: of the responses; 0 is greedy.
      seed: of prompts and responses.
    """

    rows: int = _field(minimum=0)
    prompt_length: int = _field(minimum=1)
    response_length: int = _field(minimum=2)
    temperature: float = _field(minimum=0)
    seed: int = _field(minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The loop.

    Attributes:
      steps: optimizer steps; 0 = by epochs.
      epochs: passes over the rows; ignored where steps are stated.
      num_anchors: blocks a row and step.
      anchors: "random", drawn anew at every step, or "uniform", responses cut into consecutive
        blocks (the paper's ablation, worse).
      accumulate: parts a batch is split into, one after the other, to save memory; exact.
      seed: of the drafter's weights, the order of the rows and the anchors.
      loss: "decay" (paper, Eq. 4), "uniform" or "dpace" (arXiv 2605.18810).
      gamma: of "decay"; 0 = by block size (dflash.md, section 3).
      alpha: of "dpace".
      labels: "data", the tokens of the row, or "target", the target's own argmax: for rows sampled
        at a temperature, where greedy decoding is what counts (train/loss.py).
      soft_weight: share of the target's whole distribution, at temperature 1, in the labels. Like
        "target" above, it costs the target's last layers and a second use of the head.
      attention: of the drafter: "dense", "chunked", "pallas" (a kernel for NVIDIA GPUs), or "auto":
        "pallas" where it runs, "chunked" elsewhere.
      target_attention: "dense", "cudnn" (NVIDIA GPUs, bfloat16), or "auto": "cudnn" where it runs,
        "dense" elsewhere.
      log_every, eval_every, checkpoint_every: steps between two; the last two also happen at the
        end, and 0 is then only.
      keep: checkpoints kept, the newest ones.
    """

    steps: int = _field(minimum=0)
    epochs: int = _field(minimum=0)
    num_anchors: int = _field(minimum=1)
    anchors: str = _field(choices=("random", "uniform"))
    accumulate: int = _field(minimum=1)
    seed: int = _field(minimum=0)
    loss: str = _field(choices=("decay", "uniform", "dpace"))
    gamma: float = _field(minimum=0)
    alpha: float = _field(minimum=0, maximum=1)
    labels: str = _field(choices=("data", "target"))
    soft_weight: float = _field(minimum=0, maximum=1)
    attention: str = _field(choices=("auto", "dense", "chunked", "pallas"))
    target_attention: str = _field(choices=("auto", "dense", "cudnn"))
    log_every: int = _field(minimum=1)
    eval_every: int = _field(minimum=0)
    checkpoint_every: int = _field(minimum=0)
    keep: int = _field(minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Update rule and schedule; weight decay spares norms and biases.

    Attributes:
      name: "adamw", or "muon": Muon for the matrices, AdamW for norms and biases.
      learning_rate: AdamW's at the peak.
      muon_learning_rate: Muon's at the peak; its updates have AdamW's size, so that the same
        rates suit both.
      schedule: after the warm-up: "cosine" towards 0, or "wsd", the peak until the last
        `decay_ratio` of the steps falls towards 0.
      decay_ratio, decay_shape: of "wsd"; "linear" or "1-sqrt" (arXiv 2405.18392).
      warmup_ratio: share of the steps in which the rate rises linearly.
      clip_norm: largest global norm of the gradient.
      b1, b2, eps: AdamW's.
    """

    name: str = _field(choices=("adamw", "muon"))
    learning_rate: float = _field(above=0)
    muon_learning_rate: float = _field(above=0)
    schedule: str = _field(choices=("cosine", "wsd"))
    decay_ratio: float = _field(minimum=0, maximum=1)
    decay_shape: str = _field(choices=("linear", "1-sqrt"))
    warmup_ratio: float = _field(minimum=0, below=1)
    clip_norm: float = _field(above=0)
    weight_decay: float = _field(minimum=0)
    b1: float = _field(minimum=0, below=1)
    b2: float = _field(minimum=0, below=1)
    eps: float = _field(above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Devices along each axis (dflash_jax/sharding.py)."""

    data: int = _field(minimum=1)
    fsdp: int = _field(minimum=1)
    tensor: int = _field(minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation on held-out rows.

    Attributes:
      num_rows: rows for the teacher-forced numbers.
      num_prompts: of these, prompts decoded for real; 0 = none.
      max_new_tokens: of a real decode.
      block_sizes: real decodes also with these, as if the drafter had been trained with them.
    """

    num_rows: int = _field(minimum=1)
    num_prompts: int = _field(minimum=0)
    max_new_tokens: int = _field(minimum=1)
    block_sizes: tuple[int, ...] = _field(minimum=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. `source` is the config's file, for messages."""

    target: TargetSettings
    drafter: DrafterSettings
    data: DataSettings
    synthetic: SyntheticSettings
    train: TrainSettings
    optimizer: OptimizerSettings
    mesh: MeshSettings
    eval: EvalSettings
    source: str = "config"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config") -> Settings:
        """Checks a `ConfigDict` (or nested dict).

        Raises:
          ConfigError: every unknown, missing, mistyped or out-of-range field, listed together.
        """
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        problems: list[str] = []
        hints = typing.get_type_hints(cls)
        sections = {name: hint for name, hint in hints.items() if name != "source"}
        _check_keys(values, list(sections), "", problems)
        built: dict[str, Any] = {}
        for name, section in sections.items():
            given = values.get(name)
            if isinstance(given, Mapping):
                built[name] = _read_section(section, given, name, problems)
            elif name in values:
                problems.append(f"{name}: {given!r} is not a section")
        if not problems:
            settings = cls(**built, source=source)
            problems = settings._contradictions()
            if not problems:
                return settings
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))

    def to_dict(self) -> dict[str, Any]:
        """Nested dict of plain values (without `source`), equal after a round trip over JSON."""
        values = dataclasses.asdict(self)
        del values["source"]
        return {
            section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
            for section, fields in values.items()
        }

    @contextlib.contextmanager
    def blame(self, field: str) -> Iterator[None]:
        """Errors of the body become a `ConfigError` that names the file and this field of it."""
        try:
            yield
        except (ValueError, OSError) as error:
            text = str(error).removeprefix(f"{field}: ").removeprefix("DrafterConfig: ")
            raise ConfigError(f"{self.source}: {field}: {text}") from error

    def _contradictions(self) -> list[str]:
        data, train, drafter, mesh = self.data, self.train, self.drafter, self.mesh
        problems = []
        if not (train.steps or train.epochs):
            problems.append("train.steps 0 and train.epochs 0: nothing to do")
        if bool(data.train) == bool(self.synthetic.rows):
            problems.append(
                f"data.train {list(data.train)} and synthetic.rows {self.synthetic.rows}: "
                "set one of them"
            )
        if drafter.block_size == 1:
            problems.append("drafter.block_size: 1 leaves nothing to predict")
        if not drafter.warm_start:
            problems += [
                f"drafter.{name}: {getattr(drafter, name)} needs drafter.warm_start"
                for name, least in (("num_layers", 1), ("block_size", 1), ("mask_token_id", 0))
                if getattr(drafter, name) < least
            ]
            if not (drafter.num_taps or drafter.target_layer_ids):
                problems.append("drafter.num_taps or drafter.target_layer_ids: one is needed")
        if drafter.block_size > data.max_length:
            problems.append(
                f"drafter.block_size {drafter.block_size} is above data.max_length "
                f"{data.max_length}"
            )
        rows = data.batch_size / train.accumulate
        ways = mesh.data * mesh.fsdp
        if rows % ways:
            problems.append(
                f"data.batch_size {data.batch_size} / train.accumulate {train.accumulate} is not "
                f"divisible by mesh.data {mesh.data} x mesh.fsdp {mesh.fsdp}"
            )
        o = self.optimizer
        if o.schedule == "wsd" and o.warmup_ratio + o.decay_ratio > 1:
            problems.append(
                f"optimizer.warmup_ratio {o.warmup_ratio} + decay_ratio {o.decay_ratio} is above 1"
            )
        needed = self.synthetic.prompt_length + self.synthetic.response_length
        if self.synthetic.rows and needed > data.max_length:
            problems.append(
                f"synthetic.prompt_length + response_length {needed} is above data.max_length "
                f"{data.max_length}"
            )
        return problems


def _read_section(
    section: type[S], values: Mapping[str, Any], prefix: str, problems: list[str]
) -> S | None:
    hints = typing.get_type_hints(section)
    before = len(problems)
    _check_keys(values, list(hints), f"{prefix}.", problems)
    read = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        if field.name in values:
            name = f"{prefix}.{field.name}"
            read[field.name] = _read(values[field.name], hints[field.name], name, problems)
            _check_range(read[field.name], field.metadata, name, problems)
    return section(**read) if len(problems) == before else None


def _check_keys(
    values: Mapping[str, Any], known: list[str], prefix: str, problems: list[str]
) -> None:
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f" (known: {known})"
            problems.append(f"{prefix}{name}: unknown field{hint}")
    problems += [f"{prefix}{name}: missing" for name in known if name not in values]


def _read(value: Any, hint: Any, name: str, problems: list[str]) -> Any:
    """The value as the type that the hint asks for; lists become tuples, ints serve as floats."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return None
    kind = next(option for option in options if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, (list, tuple)) and all(_is(v, item) for v in value):
            return tuple(value)
        wanted = f"a tuple of {item.__name__}"
    else:
        if kind is float and _is(value, int):
            return float(value)
        if _is(value, kind):
            return value
        wanted = kind.__name__
    problems.append(f"{name}: {value!r} ({type(value).__name__}) is not {wanted}")
    return None


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


def _check_range(value: Any, limits: Mapping[str, Any], name: str, problems: list[str]) -> None:
    choices = limits.get("choices")
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str) and choices and item not in choices:
            problems.append(f"{name}: {item!r} is not one of {list(choices)}")
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            continue
        for limit, fits in (
            ("minimum", lambda x, y: x >= y),
            ("maximum", lambda x, y: x <= y),
            ("above", lambda x, y: x > y),
            ("below", lambda x, y: x < y),
        ):
            bound = limits.get(limit)
            if not math.isfinite(item):
                problems.append(f"{name}: {item} is not a finite number")
                break
            if bound is not None and not fits(item, bound):
                problems.append(f"{name}: {item} is not allowed ({limit} {bound})")
                break
