"""Plain decoding against Transformers: the same model file, float32, the same cores, one run.

    python scripts/bench_transformers.py --output=docs/results/transformers_cpu.json

Needs the `test` extra (PyTorch). Runs of both alternate; compilation and warm-up are excluded and
medians are compared: the whole answer, prompt included, and a step, from answers of one token and
of all. The floor of a step is the time to read the weights once at the bandwidth of this run.
Passes over 4, 8 and 16 tokens show what verifying a block costs.
"""

import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import dflash_jax as dj
from dflash_jax.generation import make_request
from dflash_jax.loading import alias_file
from infer.bench_report import environment
from infer.timing import step_weight_bytes, timed_run, warm_up

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "Alias of a GGUF file.")
_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "Per run.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Runs of each.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file.")
PROMPT = "Explain in a few paragraphs why the sky is blue at noon and red in the evening."


def pass_ms(target: dj.Target, ids: list[int], tokens: int, repeats: int) -> float:
    """Milliseconds of a cached pass over `tokens` tokens with its head, in a loop on the device."""
    cache = target.model.init_cache(1, 256)
    block = np.resize(np.array(ids, np.int32), (1, tokens))
    rounds = 16

    @jax.jit
    def run(params: Any, cache: Any, block: jax.Array) -> Any:
        def one(_: int, carry: Any) -> Any:
            cache, block = carry
            hidden, _, cache = target.model.apply({"params": params}, block, cache)
            logits = target.model.apply({"params": params}, hidden, method="head")
            return cache, logits.argmax(-1).astype(block.dtype)

        return jax.lax.fori_loop(0, rounds, one, (cache, block))

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(target.params, cache, block))
        times.append((time.perf_counter() - start) / rounds)
    return 1e3 * statistics.median(times[1:])


def read_bandwidth(repeats: int) -> float:
    """Bytes a second that PyTorch reads a matrix of 512 MiB with, to multiply it by a vector."""
    matrix, vector = torch.ones(2**17, 2**10), torch.ones(2**10)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        matrix.mv(vector)
        times.append(time.perf_counter() - start)
    return 4 * matrix.numel() / statistics.median(times[1:])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    target = dj.load_target(_TARGET.value, dtype="float32")
    file = alias_file(_TARGET.value)
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    reference.generation_config.eos_token_id = None  # as with `stop_token_ids=()`
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    count, repeats = _TOKENS.value, _REPEATS.value
    request = make_request(target, None, [ids], max_new_tokens=count, stop_token_ids=())
    warm_up(request)

    def theirs(new: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]),
                # Left to itself it masks the end-of-turn tokens of the prompt as padding.
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=new,
                do_sample=False,
            )
        return time.perf_counter() - start, out[0, len(ids) :].tolist()

    seconds: dict[str, list[float]] = {"ours": [], "our_step": [], "theirs": [], "their_step": []}
    theirs(count)  # warm-up
    for _ in range(repeats):
        run = timed_run(request)
        seconds["ours"].append(run.prefill_s + run.decode_s)
        seconds["our_step"].append(run.decode_s / run.iterations)
        first, _ = theirs(1)
        whole, their_ids = theirs(count)
        seconds["theirs"].append(whole)
        seconds["their_step"].append((whole - first) / (count - 1))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    bandwidth = read_bandwidth(repeats)
    floor = step_weight_bytes(target, 1) / bandwidth
    result = {
        "command": ["python", "scripts/bench_transformers.py", *sys.argv[1:]],
        **environment(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "transformers": importlib.metadata.version("transformers"),
        "max_new_tokens": count,
        "prompt_tokens": len(ids),
        "tokens_per_second": count / median["ours"],
        "transformers_tokens_per_second": count / median["theirs"],
        "ratio": median["theirs"] / median["ours"],
        "step_ms": 1e3 * median["our_step"],
        "transformers_step_ms": 1e3 * median["their_step"],
        "step_ratio": median["their_step"] / median["our_step"],
        "step_floor_ms": 1e3 * floor,
        "read_gigabytes_per_second": bandwidth / 1e9,
        "identical": run.output.token_ids[0] == their_ids,
        "pass_ms": {str(n): pass_ms(target, ids, n, repeats) for n in (1, 4, 8, 16)},
    }
    table = Table.grid(padding=(0, 2))
    for name, key in (("dflash-jax, plain", ""), ("Transformers", "transformers_")):
        rate, step = result[key + "tokens_per_second"], result[key + "step_ms"]
        table.add_row(name, f"{rate:.1f} tokens/s, {step:.1f} ms a step")
    table.add_row("ratio", f"{result['ratio']:.2f}x; of a step {result['step_ratio']:.2f}x")
    table.add_row(
        "floor of a step",
        f"{1e3 * floor:.1f} ms: the weights once, at {bandwidth / 1e9:.1f} GB/s",
    )
    table.add_row("identical ids", "yes" if result["identical"] else "NO")
    for tokens, milliseconds in result["pass_ms"].items():
        table.add_row(f"a pass over {tokens} tokens", f"{milliseconds:.1f} ms")
    Console(highlight=False).print(table)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
