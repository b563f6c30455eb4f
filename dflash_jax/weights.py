"""Checkpoint names and layouts <-> parameters: one table of names per format, used both ways.

A row says which region of which (fused) parameter a tensor fills. Tensors of linear layers are
torch's [out, in]; parameters are [out..., in...] with group axes kept, so nothing is transposed.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import WeightsError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INDEX = "model.safetensors.index.json"
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor lives.

    Attributes:
      path: parameter, "/"-separated.
      shape: of the whole parameter.
      index: the region that the tensor fills.
      inputs: trailing axes of the region that are torch's input dimension; 0 for a vector.
    """

    path: str
    shape: tuple[int, ...]
    index: Index = ()
    inputs: int = 0

    @property
    def region(self) -> tuple[int, ...]:
        """Shape of the region, without allocating the parameter."""
        return np.broadcast_to(np.empty(()), self.shape)[self.index].shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        region = self.region
        split = len(region) - self.inputs
        sizes = math.prod(region[:split]), math.prod(region[split:])
        return sizes if self.inputs else sizes[:1]

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Checkpoint -> parameter, converting to the parameter's dtype."""
        parameter[self.index] = tensor.reshape(self.region)

    def read(self, parameter: np.ndarray) -> np.ndarray:
        """Parameter -> checkpoint, a contiguous copy."""
        return np.array(parameter[self.index].reshape(self.tensor_shape), order="C")


Table = dict[str, Placement]
_ALL = slice(None)


def target_table(config: TargetConfig) -> Table:
    """Names of Hugging Face Llama, Qwen3 and Qwen3-MoE checkpoints.

    Layout: `design.md`, QKV as [K, N/K + 2, H, D] with the query heads of a group first.
    """
    c = config
    D, V, K, R, H = (
        *(c.hidden_size, c.vocab_size),
        *(c.num_key_value_heads, c.num_groups, c.head_dim),
    )
    table = {
        "model.embed_tokens.weight": Placement("embed/embedding", (V, D), (), 1),
        "model.norm.weight": Placement("norm/scale", (D,)),
    }
    if not c.tie_word_embeddings:
        table["lm_head.weight"] = Placement("lm_head/kernel", (V, D), (), 1)
    for i in range(c.num_hidden_layers):
        name, path = f"model.layers.{i}", f"layers_{i}"
        table |= _norms(name, path, D)
        qkv = (K, R + 2, H)
        for part, index in (("q", slice(0, R)), ("k", R), ("v", R + 1)):
            row = Placement(f"{path}/attention/qkv/kernel", (*qkv, D), (_ALL, index), 1)
            table[f"{name}.self_attn.{part}_proj.weight"] = row
            if c.attention_bias:
                row = Placement(f"{path}/attention/qkv/bias", qkv, (_ALL, index))
                table[f"{name}.self_attn.{part}_proj.bias"] = row
        table |= _attention_output(name, path, (K, R, H), D, c.attention_bias)
        if c.qk_norm:
            for part in ("q_norm", "k_norm"):
                row = Placement(f"{path}/attention/{part}/scale", (H,))
                table[f"{name}.self_attn.{part}.weight"] = row
        if c.moe_layers[i]:
            table |= _experts(name, path, D, c.num_experts, c.moe_intermediate_size)
        else:
            table |= _mlp(name, path, D, c.intermediate_size, c.mlp_bias)
    return table


def drafter_table(config: DrafterConfig) -> Table:
    """Names of published DFlash drafters (`dflash.md`, section 4): 58 tensors for 5 layers.

    K and V of all layers are stacked in one parameter [L, K, 2, H, D].
    """
    c = config
    D, L, K, R, H = (
        *(c.hidden_size, c.num_hidden_layers),
        *(c.num_key_value_heads, c.num_groups, c.head_dim),
    )
    table = {
        "fc.weight": Placement("fc/kernel", (D, len(c.target_layer_ids) * D), (), 1),
        "hidden_norm.weight": Placement("hidden_norm/scale", (D,)),
        "norm.weight": Placement("norm/scale", (D,)),
    }
    for i in range(L):
        name, path = f"layers.{i}", f"layers_{i}"
        attention = f"{name}.self_attn"
        table |= _norms(name, path, D)
        q = f"{path}/attention/q"
        table[f"{attention}.q_proj.weight"] = Placement(f"{q}/kernel", (K, R, H, D), (), 1)
        for slot, part in enumerate(("k", "v")):
            row = Placement("kv/kernel", (L, K, 2, H, D), (i, _ALL, slot), 1)
            table[f"{attention}.{part}_proj.weight"] = row
            if c.attention_bias:
                row = Placement("kv/bias", (L, K, 2, H), (i, _ALL, slot))
                table[f"{attention}.{part}_proj.bias"] = row
        if c.attention_bias:
            table[f"{attention}.q_proj.bias"] = Placement(f"{q}/bias", (K, R, H))
        table[f"{attention}.q_norm.weight"] = Placement(f"{path}/attention/q_norm/scale", (H,))
        table[f"{attention}.k_norm.weight"] = Placement("k_norm/scale", (L, H), (i,))
        table |= _attention_output(name, path, (K, R, H), D, c.attention_bias)
        table |= _mlp(name, path, D, c.intermediate_size, bias=False)
    return table


def _norms(name: str, path: str, D: int) -> Table:
    return {
        f"{name}.input_layernorm.weight": Placement(f"{path}/input_norm/scale", (D,)),
        f"{name}.post_attention_layernorm.weight": Placement(f"{path}/post_norm/scale", (D,)),
    }


def _attention_output(
    name: str, path: str, heads: tuple[int, int, int], D: int, bias: bool
) -> Table:
    name, path = f"{name}.self_attn.o_proj", f"{path}/attention/out"
    table = {f"{name}.weight": Placement(f"{path}/kernel", (D, *heads), (), 3)}
    return table | ({f"{name}.bias": Placement(f"{path}/bias", (D,))} if bias else {})


def _mlp(name: str, path: str, D: int, F: int, bias: bool) -> Table:
    name, path = f"{name}.mlp", f"{path}/mlp"
    table = {f"{name}.down_proj.weight": Placement(f"{path}/down/kernel", (D, F), (), 1)}
    for slot, part in enumerate(("gate", "up")):
        row = Placement(f"{path}/gate_up/kernel", (2, F, D), (slot,), 1)
        table[f"{name}.{part}_proj.weight"] = row
        if bias:
            table[f"{name}.{part}_proj.bias"] = Placement(f"{path}/gate_up/bias", (2, F), (slot,))
    if bias:
        table[f"{name}.down_proj.bias"] = Placement(f"{path}/down/bias", (D,))
    return table


def _experts(name: str, path: str, D: int, E: int, F: int) -> Table:
    name, path = f"{name}.mlp", f"{path}/moe"
    table = {f"{name}.gate.weight": Placement(f"{path}/router/kernel", (E, D), (), 1)}
    for e in range(E):
        expert = f"{name}.experts.{e}"
        row = Placement(f"{path}/down", (E, D, F), (e,), 1)
        table[f"{expert}.down_proj.weight"] = row
        for slot, part in enumerate(("gate", "up")):
            row = Placement(f"{path}/gate_up", (E, 2, F, D), (e, slot), 1)
            table[f"{expert}.{part}_proj.weight"] = row
    return table


class TensorSource(Protocol):
    """Tensors by checkpoint name, read one at a time."""

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> np.ndarray: ...
    def where(self, name: str) -> str: ...  # file (and name in it), for messages


class SafetensorsSource:
    """`model.safetensors`, or the files of `model.safetensors.index.json`, memory-mapped.

    Raises:
      WeightsError: no checkpoint in the folder, a shard is missing or truncated, or a tensor's
        type is not floating point (quantised checkpoints).
    """

    def __init__(self, folder: Path):
        index, single = folder / INDEX, folder / "model.safetensors"
        self._tensors: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
        if index.is_file():
            content = _json(index, index.read_bytes())
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) for file in weight_map.values()
            ):
                raise WeightsError(f"{index}: weight_map must say which file holds each tensor")
            for file in sorted(set(weight_map.values())):
                self._add(folder / file)
            absent = sorted(n for n, file in weight_map.items() if self._file(n) != file)
            if absent:
                raise WeightsError(f"{index}: names {absent[:5]} that are not in their files")
        elif single.is_file():
            self._add(single)
        else:
            raise WeightsError(f"{folder}: neither {single.name} nor {index.name}")

    def _file(self, name: str) -> str | None:
        return self._tensors[name][0].name if name in self._tensors else None

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise WeightsError(f"{file}: a shard of the index is missing")
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < max(8 + length, 10):
                raise WeightsError(f"{file}: truncated, {size} bytes with a header of {length}")
            header = _json(file, handle.read(length))
        if not isinstance(header, dict):
            raise WeightsError(f"{file}: not a safetensors file, its header is {header!r:.40}")
        header.pop("__metadata__", None)
        spans = []
        for name, entry in header.items():
            begin, end, dtype, shape = _entry(f"{file}: header of {name}", entry)
            if dtype not in _DTYPES:
                raise WeightsError(f"{file}: {name} has type {dtype}, not floating point")
            if size < 8 + length + end:
                raise WeightsError(f"{file}: truncated, {size} bytes, {name} ends at {end}")
            if math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
                raise WeightsError(
                    f"{file}: {name} of shape {shape} and type {dtype} has {end - begin} bytes"
                )
            spans.append((begin, end, name))
            self._tensors[name] = (file, dtype, shape, 8 + length + begin)
        before = 0
        for begin, end, name in sorted(spans):
            if begin != before:  # the format allows neither gaps nor overlaps
                raise WeightsError(
                    f"{file}: {name} begins at {begin}, what is before ends at {before}"
                )
            before = end

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2]

    def where(self, name: str) -> str:
        return f"{self._tensors[name][0]}: {name}"

    def read(self, name: str) -> np.ndarray:
        file, dtype, shape, offset = self._tensors[name]
        return (
            np.memmap(file, _DTYPES[dtype], "r", offset, shape)
            if math.prod(shape)
            else (np.empty(shape, _DTYPES[dtype]))
        )


def _entry(label: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Begin, end, type and shape of a tensor in a header; raises WeightsError."""
    try:
        (begin, end), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{label}: {entry!r:.80}") from error
    if type(dtype) is not str or any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise WeightsError(f"{label}: {entry!r:.80}")
    return begin, end, dtype, shape


def _json(file: Path, content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError as error:
        raise WeightsError(f"{file}: no valid header or index: {error}") from error


def check_tensors(table: Table, source: TensorSource, label: str, ignore: Iterable[str]) -> None:
    """Raises one WeightsError that lists every missing, unexpected and misshapen tensor."""
    present, expected = set(source.names()) - set(ignore), set(table)
    problems = [f"missing {name}" for name in sorted(expected - present)]
    problems += [f"unexpected {source.where(name)}" for name in sorted(present - expected)]
    for name in sorted(present & expected):
        want, got = table[name].tensor_shape, source.shape(name)
        if want != got:
            problems.append(f"{source.where(name)} has shape {got}, the config asks for {want}")
    if problems:
        shown = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
        raise WeightsError(f"{label}: {len(problems)} tensors do not match the config:\n  {shown}")


def load_params(
    table: Table,
    source: TensorSource,
    dtype: Any,
    *,
    label: str,
    ignore: Iterable[str] = (),
    finite: bool = False,
    put: Callable[[str, np.ndarray], Any] = lambda path, array: array,
) -> dict[str, Any]:
    """Checkpoint -> nested parameter dict.

    Args:
      dtype: of all parameters; float16 has too narrow a range for activations and is refused.
      label: file or folder, for messages.
      ignore: names that may be present and are not used.
      finite: refuse NaN and infinity.
      put: called with (path, array) as soon as a parameter is complete, e.g. to move it to its
        devices: the host holds one whole parameter at a time, beside the memory-mapped file.

    Raises:
      WeightsError: all mismatches together, or values that are not finite.
    """
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.float32), _DTYPES["BF16"]):
        raise WeightsError(f"{label}: dtype {dtype} is not supported (float32 or bfloat16)")
    check_tensors(table, source, label, ignore)
    by_path: dict[str, list[str]] = {}
    for name, row in table.items():
        by_path.setdefault(row.path, []).append(name)
    params: dict[str, Any] = {}
    for path, names in by_path.items():
        parameter = np.empty(table[names[0]].shape, dtype)
        for name in names:
            table[name].write(parameter, source.read(name))
            if finite and not all_finite(parameter[table[name].index]):
                raise WeightsError(f"{source.where(name)} holds NaN or infinity in {dtype}")
        node = params
        *parents, leaf = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = put(path, parameter)
    return params


def export_tensors(table: Table, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Nested parameter dict -> checkpoint tensors, bit for bit and in the same dtype.

    Raises:
      WeightsError: a parameter is missing, misshapen or not finite; all are listed together.
    """
    arrays: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for path, shape in {row.path: row.shape for row in table.values()}.items():
        node: Any = params
        for key in path.split("/"):
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is None:
            problems.append(f"missing {path}")
            continue
        arrays[path] = np.asarray(node)
        if arrays[path].shape != shape:
            problems.append(f"{path} has shape {arrays[path].shape}, the config asks for {shape}")
        elif not all_finite(arrays[path]):
            problems.append(f"{path} holds NaN or infinity")
    if problems:
        raise WeightsError("cannot export: " + "; ".join(problems))
    return {name: row.read(arrays[row.path]) for name, row in table.items()}


def all_finite(array: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; bfloat16 by its exponent bits, for speed."""
    if array.dtype == _DTYPES["BF16"]:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return not np.any((bits & 0x7F80) == 0x7F80)
    return bool(np.isfinite(array).all())
