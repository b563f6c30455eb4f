"""Clocks: a request's prefill and loop, and what the device can do at best."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.generation import GenerationOutput, Request, collect


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


def _median_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@jax.jit
def _add_repeatedly(x: jax.Array, times: int) -> jax.Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)


@jax.jit
def _multiply_repeatedly(x: jax.Array, w: jax.Array, times: int) -> jax.Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)


def copy_bandwidth(num_bytes: int, times: int = 10) -> float:
    """Bytes read plus bytes written a second, one array of `num_bytes` rewritten in memory."""
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    return 2 * x.nbytes * times / _median_seconds(lambda: _add_repeatedly(x, times))


def matmul_rate(size: int, dtype: jax.typing.DTypeLike, times: int = 10) -> float:
    """Floating-point operations a second of square matrix products at the default precision."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    w = x * jnp.asarray(size**-0.5, dtype)  # keeps the products in range
    seconds = _median_seconds(lambda: _multiply_repeatedly(x, w, times))
    return 2 * size**3 * times / seconds
