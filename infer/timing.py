"""Clocks: a request's prefill and loop, and what the device can do at best."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash_jax.drafter import Drafter
from dflash_jax.generation import GenerationOutput, Request, collect
from dflash_jax.target import Target


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """Attributes:
    output: the results (ids only).
    prefill_s, decode_s: wall seconds; the loop is waited for once, at its end.
    iterations: cycles of the loop, which runs until the last row has finished.
    """

    output: GenerationOutput
    prefill_s: float
    decode_s: float
    iterations: int

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.output.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the whole time, prefill included."""
        return self.tokens / (self.prefill_s + self.decode_s)


def warm_up(request: Request) -> None:
    """Compiles both programs and runs them once: the timed runs then find them in the cache."""
    jax.block_until_ready(request.run(request.prefill(), 1))


def timed_run(request: Request) -> TimedRun:
    """Runs a request whose programs are compiled (`warm_up`)."""
    start = time.perf_counter()
    state = jax.block_until_ready(request.prefill())
    middle = time.perf_counter()
    state = jax.block_until_ready(request.run(state))
    end = time.perf_counter()
    iterations = int(jnp.max(state.cycles_B))
    output = collect(state, request.prompt_length_B)
    return TimedRun(output, middle - start, end - middle, iterations)


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read plus bytes written a second, one array of `num_bytes` rewritten in place."""
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    rewrite = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * x.nbytes / _seconds_a_call(rewrite, x)


def matmul_rate(size: int, dtype: jax.typing.DTypeLike) -> float:
    """Floating-point operations a second of square matrix products at the set precision."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    w = x * jnp.asarray(size**-0.5, dtype)  # keeps the products in range
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / _seconds_a_call(lambda x: product(x, w), x)


def _seconds_a_call(
    step: Callable[[jax.Array], jax.Array], x: jax.Array, calls: int = 10, repeats: int = 5
) -> float:
    """Median over the repeats; calls are queued behind each other and waited for once."""
    times = []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        for _ in range(calls):
            x = step(x)
        x.block_until_ready()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def step_weight_bytes(target: Target, tokens: int) -> float:
    """Bytes of the weights that a pass over `tokens` tokens reads, head included.

    The embedding counts only as a tied head; of a mixture, the experts that `tokens` tokens choose
    if they choose evenly: `1 - (1 - k/E) ** tokens` of all.
    """
    c = target.config
    read_of_experts = 1.0
    if c.num_experts:
        read_of_experts = 1 - (1 - c.num_experts_per_tok / c.num_experts) ** tokens
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        names = [key.key for key in path]
        if names[0] == "embed" and not c.tie_word_embeddings:
            continue
        expert = "moe" in names and "router" not in names
        total += _num_bytes(leaf) * (read_of_experts if expert else 1.0)
    return total


def cycle_weight_bytes(target: Target, drafter: Drafter, tokens: int) -> float:
    """Bytes of the weights that a cycle over `tokens` verified tokens reads: the target, the
    drafter, and the target's head once more for the drafts."""
    tied = target.config.tie_word_embeddings
    head = target.params["embed"]["embedding"] if tied else target.params["lm_head"]["kernel"]
    drafter_bytes = sum(_num_bytes(leaf) for leaf in jax.tree.leaves(drafter.params))
    return step_weight_bytes(target, tokens) + drafter_bytes + _num_bytes(head)


def _num_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize
