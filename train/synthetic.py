"""A seeded target and rows that it writes itself: a run without files or network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.generation import SamplingParams, generate_ids
from dflash_jax.target import Target, init_target
from train.settings import SyntheticSettings

TINY = "tiny"
# Matrices of std 0.04 instead of 0.02: attention then matters, and the next token depends on more
# than the last one.
_GAIN = 2.0
_BATCH = 64


def tiny_target(seed: int, dtype: jnp.dtype) -> Target:
    """Four Qwen3 layers, 64 wide, 64 ids: small enough for a test, deep enough to tap."""
    config = TargetConfig.tiny(
        "qwen3", vocab_size=64, hidden_size=64, head_dim=16, intermediate_size=128
    )
    target = init_target(config, seed=seed, name=f"{TINY}-{seed}")
    params = jax.tree.map(lambda p: (p * _GAIN if p.ndim > 1 else p).astype(dtype), target.params)
    model = type(target.model)(config, jnp.dtype(dtype))
    return dataclasses.replace(target, params=params, model=model)


def write_rows(
    path: Path, target: Target, settings: SyntheticSettings, avoid: tuple[int, ...] = ()
) -> Path:
    """Writes regenerated rows (the form of `train/data.py`) unless these settings' file exists.

    Args:
      avoid: ids that prompts do not contain (the mask).
    """
    made_by = json.dumps([dataclasses.asdict(settings), target.name, sorted(avoid)])
    digest = hashlib.sha256(made_by.encode()).hexdigest()[:12]
    path = path.with_stem(f"{path.stem}-{digest}")
    if path.exists():
        return path
    allowed = np.setdiff1d(np.arange(target.config.vocab_size), np.array(avoid, np.int64))
    rng = np.random.default_rng(settings.seed)
    prompts = rng.choice(allowed, (settings.rows, settings.prompt_length)).tolist()
    lines = []
    for start in range(0, len(prompts), _BATCH):
        part = prompts[start : start + _BATCH]
        seeds = range(settings.seed + start, settings.seed + start + len(part))
        # The last batch is filled up: another size would be another compilation.
        filler = _BATCH - len(part)
        out = generate_ids(
            target,
            None,
            part + [part[0]] * filler,
            sampling=[SamplingParams(settings.temperature, seed=s) for s in seeds]
            + [SamplingParams(settings.temperature)] * filler,
            max_new_tokens=settings.response_length,
        )
        for i, prompt in enumerate(part):
            row = {
                "id": str(start + i),
                "prompt_ids": prompt,
                "response_ids": out.token_ids[i],
                "finish_reason": out.finish_reasons[i],
                "temperature": settings.temperature,
                "seed": seeds[i],
                "messages": [],
                "target": target.name,
            }
            lines.append(json.dumps(row) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("".join(lines))
    os.replace(temporary, path)
    return path
