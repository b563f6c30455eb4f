"""Transformers on the prompts of a held-out set: plain generate and prompt-lookup decoding.

    python scripts/bench_lookup.py --target=smollm2-135m-instruct --set=humaneval --num_prompts=8 \\
        --output=docs/results/transformers_lookup_h200.json

Needs the `test` extra (PyTorch). The model is our own target, written as a Hugging Face folder, so
that both have the same weights in the same precision. jax stays on the CPU: the card is PyTorch's.
Batch 1, which is all that prompt lookup can do. Compilation and warm-up are excluded. Ways:

  eager     `generate` as it is
  lookup    prompt-lookup decoding (`prompt_lookup_num_tokens`), which refuses static caches
  compiled  `generate` with a static cache; on a GPU Transformers then compiles the pass
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
from absl import app, flags, logging
from rich.console import Console
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from dflash_jax import weights
from dflash_jax.loading import load_target
from dflash_jax.target import Target
from infer.bench_report import environment
from train.chat import ChatFormat
from train.heldout import SETS, HeldOutSet, held_out_set
from train.regenerate import RegenerateSettings

WAYS = ("eager", "lookup", "compiled")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Adds this command's flags to `values`."""
    options: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("target", None, "Folder, hub id, GGUF or alias.", **options)
    flags.DEFINE_enum("set", "humaneval", SETS, "Held-out set.", **options)
    flags.DEFINE_integer("num_prompts", 8, "The first ones of the set.", lower_bound=1, **options)
    flags.DEFINE_integer("max_new_tokens", 512, "Of a prompt.", lower_bound=2, **options)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0, **options)
    flags.DEFINE_list("ways", list(WAYS), f"Of {', '.join(WAYS)}.", **options)
    flags.DEFINE_integer("lookup_tokens", 10, "Drafts of a lookup.", lower_bound=1, **options)
    flags.DEFINE_integer("seed", 0, "Of sampling; each prompt's follows.", lower_bound=0, **options)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Default: bfloat16 on a GPU.", **options
    )
    flags.DEFINE_string("output", None, "JSON file.", **options)


def write_folder(target: Target, folder: Path) -> None:
    """The target as Transformers reads it: config.json and model.safetensors."""
    tensors = weights.export_tensors(weights.target_table(target.config), target.params)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = target.config.to_hf()
    if "sliding_attention" not in target.config.layer_types:
        # Transformers makes a mask for each of these kinds where the cache is static, also for
        # Llama, whose layers then do not know what to do with them.
        config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def generate_options(way: str, lookup_tokens: int, temperature: float) -> dict[str, Any]:
    """Arguments of `generate` for one way."""
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if way == "compiled":
        options["cache_implementation"] = "static"
    if way == "lookup":
        options["prompt_lookup_num_tokens"] = lookup_tokens
    return options


def measure(
    model: Any, way: str, prompts: HeldOutSet, options: Any, stop_token_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Tokens a second of one way over all prompts, after one prompt to warm up."""
    settings = RegenerateSettings(temperature=options.temperature, seed=options.seed)
    extra = generate_options(way, options.lookup_tokens, options.temperature)

    def once(key: str, ids: list[int], new: int) -> list[int]:
        torch.manual_seed(settings.sampling(key).seed)
        tokens = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            out = model.generate(
                tokens,
                # Left to itself it masks the end-of-turn tokens of the prompt as padding.
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                eos_token_id=list(stop_token_ids) or None,
                pad_token_id=0,
                **extra,
            )
        return out[0, len(ids) :].tolist()

    items = list(zip(prompts.ids, prompts.prompt_ids, strict=True))
    # The longest prompt with its whole budget makes the largest static cache, which Transformers
    # keeps: the pass is compiled once. The other ways have nothing to compile.
    longest = max(items, key=lambda item: len(item[1]))
    started = time.perf_counter()
    once(*longest, options.max_new_tokens if way == "compiled" else min(16, options.max_new_tokens))
    warm_up_s = time.perf_counter() - started
    started = time.perf_counter()
    answers = [once(key, ids, options.max_new_tokens) for key, ids in items]  # on the host: done
    seconds = time.perf_counter() - started
    tokens = sum(map(len, answers))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "warm_up_seconds": warm_up_s,
        "token_ids": answers,
    }


def benchmark(options: Any, command: list[str], console: Console) -> dict[str, Any]:
    """Loads, measures and returns the results.

    Raises:
      ValueError, OSError: an option that is not possible, or what is not there.
    """
    if not options.target:
        raise ValueError("target: must be given")
    if unknown := [way for way in options.ways if way not in WAYS]:
        raise ValueError(f"ways: {unknown[0]!r} is not one of {', '.join(WAYS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    target = load_target(options.target, dtype=dtype)
    chat = ChatFormat(target.tokenizer, None, target.stop_token_ids or None)
    prompts = held_out_set(options.set, chat).first(options.num_prompts)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(target, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    result = {"command": ["python", "scripts/bench_lookup.py", *command], **environment()}
    result["versions"]["torch"] = torch.__version__
    result["hardware"] |= {
        "backend": "gpu" if device == "cuda" else "cpu",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "devices": torch.cuda.device_count() if device == "cuda" else 1,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    result |= {
        "target": target.name,
        "dtype": dtype,
        "set": prompts.name,
        "prompts": len(prompts.ids),
        "prompts_sha256": prompts.sha256,
        "batch_size": 1,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "lookup_tokens": options.lookup_tokens,
        "torch_threads": torch.get_num_threads(),
        "ways": {},
    }
    answers: dict[str, list[list[int]]] = {}
    for way in options.ways:
        numbers = measure(model, way, prompts, options, target.stop_token_ids)
        answers[way] = numbers.pop("token_ids")
        pairs = zip(answers[way], answers[options.ways[0]], strict=True)
        numbers["same_as_first"] = sum(ids == first for ids, first in pairs)
        result["ways"][way] = numbers
        console.print(
            f"{way}: {numbers['tokens_per_second']:.1f} tokens/s, the ids of {options.ways[0]} in "
            f"{numbers['same_as_first']} of {len(prompts.ids)}"
        )
        if options.output:
            text = json.dumps(result, indent=1) + "\n"
            Path(options.output).write_text(text, encoding="utf-8")
    return result


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        benchmark(flags.FLAGS, sys.argv[1:], Console(highlight=False, soft_wrap=True))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
