"""The decode loop cycle by cycle: caches against recomputation, losslessness at length, rows."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import insert_rows
from dflash_jax.decode import BoundTarget, DecodeParams, DecodeSpec, DecodeState
from dflash_jax.drafter import Drafter, block_embeddings, draft_logits
from dflash_jax.generation import SamplingParams, collect, make_request
from dflash_jax.layers import apply
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import Target, TargetModel, target_forward
from tests.rigs import (
    NEW,
    OPTIONS,
    ORACLE,
    SLOTS,
    STUBS,
    expected,
    greedy_reference,
    random_prompts,
    row_of,
    run,
    stub,
    tiny_drafter,
    tiny_target,
)
from tests.test_golden_decode import ROOT, load

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@partial(jax.jit, static_argnums=0)
def cached_draft_logits(spec: DecodeSpec, params: DecodeParams, state: DecodeState) -> jax.Array:
    """Draft logits of the next block from the drafter's cache, as `propose` computes them."""
    proposer: Any = spec.proposer
    position_B = state.cache.length_B
    anchor_B1 = jnp.take_along_axis(state.tokens_BS, position_B[:, None], axis=1)
    bound = BoundTarget(spec.target, params.target)
    block = block_embeddings(
        bound.embed, anchor_B1, proposer.block_size, proposer.model.config.mask_token_id
    )
    hidden = apply(
        proposer.model,
        params.draft,
        block,
        position_B[:, None],
        state.draft.k,
        state.draft.v,
        method="draft",
    )
    return bound.head(hidden[:, 0])


def golden_case() -> tuple[Target, Drafter, list[list[int]], dict]:
    golden = load("qwen3")
    return golden.target, golden.drafter, golden.prompts, {"num_slots": 256}


def sliding_case() -> tuple[Target, Drafter, list[list[int]], dict]:
    prompts = random_prompts([1, 9, 28, 5], seed=3)
    return tiny_target(), tiny_drafter(**SLIDING), prompts, {**OPTIONS, "max_new_tokens": 12}


@pytest.mark.parametrize("case", [golden_case, sliding_case])
def test_draft_cache_equals_recomputation_at_every_cycle(case: Any) -> None:
    """It holds context only: nothing of rejected tokens, pads or the block's own keys is left."""
    target, drafter, prompts, options = case()
    request = make_request(
        target, drafter, prompts, **{"max_new_tokens": 48, "stop_token_ids": (), **options}
    )
    state = request.prefill()
    rows = np.arange(len(prompts))
    previous = None
    while (state.finish_B == 0).any():
        tokens, position = np.asarray(state.tokens_BS), np.asarray(state.cache.length_B)
        np.testing.assert_array_equal(state.draft.length_B, position)
        _, features = target_forward(target, tokens, drafter.config.target_layer_ids)
        fresh = draft_logits(target, drafter, features, tokens[rows, position], position)
        cached = cached_draft_logits(request.spec, request.params, state)
        running = np.asarray(state.finish_B) == 0
        np.testing.assert_allclose(
            np.asarray(cached)[running], np.asarray(fresh)[running], atol=1e-4, rtol=0
        )
        if previous is not None:  # and these drafts decided the last acceptance
            drafts, before = previous
            for row in rows[running]:
                taken = tokens[row, before[row] + 1 : position[row] + 1]
                assert drafts[row, 1 : len(taken)].tolist() == taken[:-1].tolist()
                if len(taken) < drafter.config.block_size:
                    assert drafts[row, len(taken)] != taken[-1]
        previous = np.asarray(fresh).argmax(-1), position
        state = request.run(state, 1)
    lengths = collect(state, request.prompt_length_B).acceptance_lengths
    if case is golden_case:
        assert {1, 2, 8} <= {length for row in lengths for length in row}


@pytest.mark.parametrize("kind", ["dflash", "stub", "plain"])
def test_a_few_cycles_at_a_time_equal_the_whole_loop(kind: str) -> None:
    target, prompts = tiny_target(), random_prompts([1, 9, 28, 5], seed=3)
    plain = run(target, None, prompts).token_ids
    script = [a + b for a, b in zip(prompts, plain, strict=True)]
    drafter = {
        "dflash": tiny_drafter(),
        "stub": stub(target, script, [1, ORACLE, 3, 0]),
        "plain": None,
    }[kind]
    request = make_request(target, drafter, prompts, max_new_tokens=NEW, **OPTIONS)
    whole = collect(request.run(request.prefill()), request.prompt_length_B)
    state, seen = request.prefill(), 1
    for step in (0, 1, 2, 5, 1, 60):
        state = request.run(state, step)
        out = collect(state, request.prompt_length_B)
        seen += step
        for row, ids in enumerate(out.token_ids):  # what streams is final
            assert ids == whole.token_ids[row][: len(ids)]
            assert out.acceptance_lengths[row] == whole.acceptance_lengths[row][: seen - 1]
    assert out == whole


CONTEXT_200 = 240


@cache
def hundred() -> tuple[Target, list[list[int]], list[list[int]]]:
    target = tiny_target(max_position_embeddings=CONTEXT_200)
    prompts = random_prompts([1 + i % 31 for i in range(100)], seed=8)
    out = run(target, None, prompts, max_new_tokens=200, num_slots=256)
    return target, prompts, out.token_ids


def test_plain_decoding_equals_uncached_passes() -> None:
    target, prompts, plain = hundred()
    some = list(range(0, 100, 25))
    picked = [prompts[i] for i in some]
    wanted = greedy_reference(target, picked, 60)
    assert wanted.tolist() == [plain[i][:60] for i in some]


@pytest.mark.parametrize("right", STUBS.values(), ids=STUBS.keys())
def test_100_prompts_of_200_tokens_equal_plain_greedy(right: int) -> None:
    target, prompts, plain = hundred()
    script = [a + b for a, b in zip(prompts, plain, strict=True)]
    drafter = stub(target, script, right, num_slots=256)
    out = run(target, drafter, prompts, max_new_tokens=200, num_slots=256)
    assert out.token_ids == plain
    lengths = expected(plain[0], 200, (), right)[1]
    assert out.acceptance_lengths == [lengths] * 100


def test_a_sliding_target_decodes_as_its_uncached_passes() -> None:
    target = tiny_target(**SLIDING)
    prompts = random_prompts([1, 9, 28, 5], seed=3)
    wanted = greedy_reference(target, prompts, NEW).tolist()
    script = [a + b for a, b in zip(prompts, wanted, strict=True)]
    out = run(target, stub(target, script, [1, ORACLE, 3, 0]), prompts)
    assert out.token_ids == wanted


def test_a_row_inserted_into_a_running_batch_equals_its_own_run() -> None:
    """A finished row is replaced by a new request; neighbours do not notice."""
    target, prompts = tiny_target(), random_prompts([5, 9, 28, 1], seed=3)
    plain = run(target, None, prompts).token_ids
    script = [a + b for a, b in zip(prompts, plain, strict=True)]
    right = [3, ORACLE, 1, 6]
    # The batch starts with prompt 0 in rows 0 and 3; row 3 is then replaced by prompt 3.
    first = [0, 1, 2, 0]
    drafter = stub(target, [script[i] for i in first], [right[i] for i in first])
    request = make_request(
        target,
        drafter,
        [prompts[i] for i in first],
        max_new_tokens=[NEW, NEW, NEW, 4],
        **OPTIONS,
    )
    state = request.run(request.prefill(), 3)
    assert state.finish_B.tolist() == [0, 0, 0, 2]
    single = make_request(
        target, stub(target, [script[3]], right[3]), [prompts[3]], max_new_tokens=NEW, **OPTIONS
    )
    state = jax.jit(insert_rows)(state, np.array([3]), single.prefill())
    late = dataclasses.replace(
        request, params=DecodeParams(target.params, stub(target, script, right).params)
    )
    out = collect(late.run(state), np.array([len(prompt) for prompt in prompts]))
    for row in range(4):
        wanted = expected(plain[row], NEW, (), right[row])
        assert row_of(out, row)[:3] == wanted


def test_bfloat16_parts_only_at_a_near_tie() -> None:
    """Blocks of another width round otherwise; where ids part, the two logits nearly tie."""
    full = tiny_target()
    target = dataclasses.replace(
        full,
        model=TargetModel(full.config, jnp.dtype(jnp.bfloat16)),
        params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), full.params),
    )
    prompts = random_prompts([5, 9, 28, 1], seed=3)
    plain = run(target, None, prompts).token_ids
    script = [a + b for a, b in zip(prompts, plain, strict=True)]
    drafter = stub(target, script, ORACLE)
    out = run(target, drafter, prompts)
    for row, (mine, theirs) in enumerate(zip(out.token_ids, plain, strict=True)):
        assert len(mine) == len(theirs) == NEW
        part = next((i for i in range(NEW) if mine[i] != theirs[i]), None)
        if part is not None:
            tokens = np.zeros((1, SLOTS), np.int32)
            prefix = prompts[row] + plain[row][:part]
            tokens[0, : len(prefix)] = prefix
            logits = np.asarray(target_forward(target, tokens)[0])[0, len(prefix) - 1]
            scale = np.abs(logits).max()
            assert abs(logits[mine[part]] - logits[theirs[part]]) < 0.03 * scale
    assert sum(sum(row) for row in out.acceptance_lengths) == 4 * (NEW - 1)


def test_loaded_models_decode_without_a_copy_of_the_target() -> None:
    """The drafter shares the target's embedding and head by reference."""
    target = load_target(ROOT / "llama" / "target")
    drafter = load_drafter(ROOT / "llama" / "drafter", target)
    request = make_request(
        target, drafter, [[1, 2]], sampling=SamplingParams(), stop_token_ids=(), max_new_tokens=4
    )
    assert request.params.target is target.params
    assert request.params.draft is drafter.params
    assert not {"embed", "lm_head"} & set(drafter.params)
