"""What the benchmark runs on: models from files or of random weights, and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter, init_drafter
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import Target, init_target
from infer.prompts import Prompt, encode_prompts, has_chat_template

PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "Translate to French: The train to the coast leaves at nine in the morning.",
    "List five uses of a paper clip.",
    "What is the derivative of x**3 + 2*x? Show each step.",
    "Write a short story about a lighthouse keeper.",
    "Summarise the rules of chess for a beginner.",
)
# Config classmethods that can be filled with random weights.
RANDOM = ("tiny", "smollm2_135m", "qwen3_4b", "qwen3_8b", "qwen3_coder_30b_a3b", "llama31_8b")


def load_models(options: Any) -> tuple[Target, Drafter | None]:
    """Target and drafter from files, or random ones of a stated size."""
    if (options.target is None) == (options.random_weights is None):
        raise ValueError("target, random_weights: exactly one of them must be given")
    if options.target is not None:
        target = load_target(options.target, dtype=options.dtype)
        if options.drafter is None:
            return target, None
        return target, load_drafter(options.drafter, target, dtype=options.dtype)
    if options.drafter is not None:
        raise ValueError("drafter: --random_weights brings its own")
    name = options.random_weights
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config = getattr(TargetConfig, name)()
    if hasattr(DrafterConfig, name):
        drafter_config = getattr(DrafterConfig, name)()
    else:
        taps = 5 if config.num_hidden_layers >= 9 else 1
        drafter_config = DrafterConfig.for_target(
            config, mask_token_id=config.vocab_size - 1, num_taps=taps
        )
    target = init_target(config, seed=options.seed, dtype=dtype, name=f"random {name}")
    return target, init_drafter(target, drafter_config, seed=options.seed, dtype=dtype)


def load_prompts(options: Any, target: Target) -> list[list[int]]:
    """Ids of the prompts: random ones for random weights, else from the file or the built-in list.
    Text becomes a user message where the target has a chat template."""
    if options.random_weights:
        if options.prompt_file:
            raise ValueError("prompt_file: --random_weights takes random prompts")
        if options.prompt_length < 1:
            raise ValueError(f"prompt_length: {options.prompt_length} must be at least 1")
        rng = np.random.default_rng(options.seed)
        shape = (options.batch_size, options.prompt_length)
        return rng.integers(0, target.config.vocab_size, shape).tolist()
    prompts: list[Prompt] = list(PROMPTS)
    if options.prompt_file:
        prompts = read_prompts(Path(options.prompt_file))
    if has_chat_template(target):
        prompts = [
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
    return encode_prompts(target, prompts)


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line; in `.jsonl` files an object with `prompt` or `messages`.

    Raises:
      ValueError: no prompt, or a line that is none, with file and line number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: no prompts")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        keys = {"prompt", "messages"} & set(record) if isinstance(record, dict) else set()
        if len(keys) != 1:
            raise ValueError(f"{path}:{number}: expected an object with `prompt` or `messages`")
        prompts.append(record[keys.pop()])
    return prompts
