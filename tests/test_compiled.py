"""What the compiler makes of the loop: no copied caches, donated state, few compilations."""

from __future__ import annotations

import re
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decode import prefill, run_cycles
from dflash_jax.generation import Request, SamplingParams, make_request, slot_bucket
from tests.rigs import (
    CONTEXT,
    NEVER,
    NEW,
    OPTIONS,
    SLOTS,
    random_prompts,
    run,
    stub,
    tiny_drafter,
    tiny_target,
)

KINDS = ("plain", "dflash")


def request_of(kind: str, batch: int) -> Request:
    drafter = tiny_drafter() if kind == "dflash" else None
    prompts = random_prompts([5] * batch)
    return make_request(tiny_target(), drafter, prompts, max_new_tokens=NEW, **OPTIONS)


def cache_copies(text: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions that copy an array of the cache's size, whatever its layout."""
    dims = ",".join(map(str, shape))
    return re.findall(rf"%\S+ = f32\[{dims}\]\S* (?:copy|copy-start)\(.*", text)


def compiled_text(request: Request) -> str:
    state = request.prefill()
    lowered = run_cycles.lower(request.spec, request.params, state, np.int32(1))
    return lowered.compile().as_text() or ""


def compilations() -> tuple[int, int]:
    functions: tuple[Any, Any] = (prefill, run_cycles)
    return functions[0]._cache_size(), functions[1]._cache_size()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_cache_is_copied_in_the_loop(kind: str, batch: int) -> None:
    config = tiny_target().config
    text = compiled_text(request_of(kind, batch))
    shape = (batch, config.num_key_value_heads, SLOTS, config.head_dim)
    assert f"f32[{','.join(map(str, shape))}]" in text
    assert cache_copies(text, shape) == []
    # Every leaf of the state lives in the buffer it came in.
    header = text.splitlines()[0]
    aliases = header[header.index("input_output_alias") : header.index("entry_computation_layout")]
    state = jax.eval_shape(lambda: request_of(kind, batch).prefill())
    assert aliases.count("-alias)") == len(jax.tree.leaves(state))


def test_a_copied_cache_would_be_seen() -> None:
    """A loop that reads the old cache after writing the new one has to copy it."""

    def body(i, carry):
        cache, total = carry
        new = jax.lax.dynamic_update_slice(cache, jnp.ones((1, 2, 1, 8)) * total, (0, 0, i, 0))
        return new, total + jnp.sum(jnp.sin(cache) * new)

    def loop(cache):
        return jax.lax.fori_loop(0, 5, body, (cache, 1.0))

    cache = jnp.zeros((1, 2, SLOTS, 8))
    text = jax.jit(loop, donate_argnums=0).lower(cache).compile().as_text()
    assert cache_copies(text, cache.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_given_away(kind: str) -> None:
    request = request_of(kind, 4)
    state = request.prefill()
    leaves = jax.tree.leaves(state)
    params = jax.tree.leaves(request.params)
    after = request.run(state, 1)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(leaf.is_deleted() for leaf in params if isinstance(leaf, jax.Array))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_compilations_are_bounded_by_buckets() -> None:
    """20 prompts of different lengths, budgets, seeds, temperatures and stop ids: one a bucket."""
    target = tiny_target(max_position_embeddings=400)
    lengths = [1 + 10 * i for i in range(20)]
    budgets = [3 + i % 5 for i in range(20)]
    buckets = {slot_bucket(a + b + 1, 32) for a, b in zip(lengths, budgets, strict=True)}
    assert buckets == {128, 256}

    def everything() -> tuple[int, int]:
        before = compilations()
        for i, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
            run(
                target,
                None,
                random_prompts([length], seed=i),
                max_new_tokens=budget,
                sampling=SamplingParams(0.5 + i / 10, seed=i),
                stop_token_ids=tuple(range(i % 5)),
                num_slots=None,
                prefill_chunk=32,
            )
        after = compilations()
        return after[0] - before[0], after[1] - before[1]

    assert everything() == (2, 2)
    assert everything() == (0, 0)


def test_no_compilation_in_steady_decoding() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    run(target, drafter, random_prompts([5]))
    before = compilations()
    for i in range(20):
        prompts = random_prompts([1 + 5 * i], seed=i)
        request = make_request(target, drafter, prompts, max_new_tokens=i, **OPTIONS)
        state = request.prefill()
        for cycles in (1, np.int32(2), 3):  # a stream's calls
            state = request.run(state, cycles)
    assert compilations() == before


@pytest.mark.slow
def test_flat_memory_over_20000_cycles() -> None:
    """Requests on the same objects, a cycle a call: no live array and no memory is left behind."""
    target = tiny_target()
    room = CONTEXT - 2
    prompts = random_prompts([2], seed=5)
    plain = run(target, None, prompts, max_new_tokens=room)
    drafters = [tiny_drafter(), stub(target, [prompts[0] + plain.token_ids[0]], NEVER)]

    def requests(count: int) -> tuple[int, int, int, int]:
        cycles = 0
        for i in range(count):
            request = make_request(
                target, drafters[i % 2], prompts, **{**OPTIONS, "max_new_tokens": room}
            )
            state = request.prefill()
            for _ in range(room - 1):
                state = request.run(state, 1)
            assert state.finish_B.tolist() == [2]
            row = np.asarray(state.accepted_BS)[0, : int(state.cycles_B[0])]
            assert row.sum() == room - 1
            cycles += len(row)
        del state, request
        arrays = jax.live_arrays()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return cycles, len(arrays), sum(a.nbytes for a in arrays), peak

    _, count, size, peak = requests(10)
    cycles, count_after, size_after, peak_after = requests(200)
    assert cycles >= 20_000
    assert (count_after, size_after) == (count, size)
    assert peak_after - peak < 8 * 1024  # KiB; a leak of one cache a cycle would be 300 MiB
