"""Rows of the pitfall list, part Decoding: where other implementations broke (stub drafters)."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import init_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.generation import collect, generate_ids, make_request, slot_bucket
from dflash_jax.target import Target, TargetModel, target_forward
from tests.rigs import (
    BLOCK,
    CHUNK,
    CONTEXT,
    NEVER,
    NEW,
    OPTIONS,
    ORACLE,
    SLOTS,
    STUBS,
    TAPS,
    expected,
    greedy_reference,
    random_prompts,
    row_of,
    run,
    stub,
    tiny_drafter,
    tiny_target,
)


@cache
def distinct_prompt() -> tuple[list[int], list[int]]:
    """A prompt whose first 20 greedy tokens are distinct, so that any of them can be "the" stop."""
    prompts = random_prompts([5] * 64)
    continuations = run(tiny_target(), None, prompts).token_ids

    def distinct(ids: list[int]) -> int:
        return next((i for i in range(len(ids)) if ids[i] in ids[:i]), len(ids))

    best = max(range(64), key=lambda i: distinct(continuations[i]))
    assert distinct(continuations[best]) >= 18
    return prompts[best], continuations[best]


def stub_of(prompt: list[int], continuation: list[int], right: int):
    return stub(tiny_target(), [prompt + continuation], right)


def check_counts(out) -> None:
    for ids, lengths in zip(out.token_ids, out.acceptance_lengths, strict=True):
        assert all(1 <= length <= BLOCK for length in lengths)
        assert len(ids) == (1 + sum(lengths) if ids else 0)


def test_the_rig_is_right() -> None:
    prompt, continuation = distinct_prompt()
    assert greedy_reference(tiny_target(), [prompt], NEW)[0].tolist() == continuation


# Token 0 is the prefill's. With all drafts right a cycle commits tokens 1..8, then 9..16: token 9
# is offset 0 of the second block, 10 offset 1, 15 the last draft, 16 the bonus.
@pytest.mark.parametrize("index", [0, 1, 2, 7, 8, 9, 10, 13, 15, 16, 17])
@pytest.mark.parametrize("right", STUBS.values(), ids=STUBS.keys())
def test_ends_exactly_at_the_first_stop_token(index: int, right: int) -> None:
    prompt, continuation = distinct_prompt()
    elsewhere = [token for token in range(20) if token not in continuation[:18]][:2]
    stops = (elsewhere[0], continuation[index], elsewhere[1], continuation[17])
    out = run(tiny_target(), stub_of(prompt, continuation, right), [prompt], stop_token_ids=stops)
    ids, lengths, reason = expected(continuation, NEW, stops, right)
    assert len(ids) == index + 1
    assert reason == "stop"
    assert row_of(out, 0)[:3] == (ids, lengths, reason)
    plain = run(tiny_target(), None, [prompt], stop_token_ids=stops)
    assert plain.token_ids == out.token_ids
    assert plain.finish_reasons == out.finish_reasons == ["stop"]
    check_counts(plain)


def test_many_stop_ids() -> None:
    prompt, continuation = distinct_prompt()
    drafter = stub_of(prompt, continuation, ORACLE)
    stops = [token for token in range(120) if token not in continuation[:11]]
    out = run(tiny_target(), drafter, [prompt], stop_token_ids=stops)
    assert row_of(out, 0)[:3] == expected(continuation, NEW, stops, ORACLE)


def test_stop_ids_of_the_targets_files_are_the_default() -> None:
    prompt, continuation = distinct_prompt()
    target = dataclasses.replace(tiny_target(), stop_token_ids=(continuation[4],))
    drafter = stub_of(prompt, continuation, ORACLE)
    out = run(target, drafter, [prompt], stop_token_ids=None)
    assert (out.token_ids[0], out.finish_reasons) == (continuation[:5], ["stop"])
    out = run(target, drafter, [prompt], stop_token_ids=())
    assert (out.token_ids[0], out.finish_reasons) == (continuation, ["length"])


@pytest.mark.parametrize("budget", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, NEW])
@pytest.mark.parametrize("right", STUBS.values(), ids=STUBS.keys())
def test_ends_exactly_at_max_new_tokens(budget: int, right: int) -> None:
    prompt, continuation = distinct_prompt()
    drafter = stub_of(prompt, continuation, right)
    out = run(tiny_target(), drafter, [prompt], max_new_tokens=budget)
    ids, lengths, reason = expected(continuation, budget, (), right)
    assert row_of(out, 0)[:3] == (ids, lengths, reason)
    assert ids == continuation[:budget]
    plain = run(tiny_target(), None, [prompt], max_new_tokens=budget)
    assert (plain.token_ids, plain.finish_reasons) == (out.token_ids, ["length"])
    check_counts(plain)


@pytest.mark.parametrize("right", [ORACLE, 3])
def test_stop_on_the_last_token_of_the_budget_is_a_stop(right: int) -> None:
    prompt, continuation = distinct_prompt()
    out = run(
        tiny_target(),
        stub_of(prompt, continuation, right),
        [prompt],
        max_new_tokens=12,
        stop_token_ids=(continuation[11],),
    )
    assert (out.token_ids[0], out.finish_reasons) == (continuation[:12], ["stop"])


def test_mean_acceptance_length_leaves_cut_cycles_out() -> None:
    prompt, continuation = distinct_prompt()
    out = run(tiny_target(), stub_of(prompt, continuation, 3), [prompt], max_new_tokens=12)
    assert out.acceptance_lengths == [[4, 4, 3]]
    assert out.cut == [True]
    assert out.mean_acceptance_length == 4.0
    out = run(tiny_target(), stub_of(prompt, continuation, 3), [prompt], max_new_tokens=9)
    assert (out.acceptance_lengths, out.cut) == ([[4, 4]], [False])


def test_a_second_request_equals_a_fresh_one() -> None:
    prompt, continuation = distinct_prompt()
    target = tiny_target()
    drafters = {"dflash": tiny_drafter(), "stub": stub_of(prompt, continuation, 3), "plain": None}
    for drafter in drafters.values():
        first = run(target, drafter, [prompt])
        short = run(target, drafter, [prompt], max_new_tokens=3)
        aborted = make_request(target, drafter, [prompt[:3]], max_new_tokens=NEW, **OPTIONS)
        state = aborted.run(aborted.prefill(), 2)
        again = run(target, drafter, [prompt])
        assert row_of(again, 0) == row_of(first, 0)
        assert short.token_ids[0] == first.token_ids[0][:3]
        # The one half-way goes on undisturbed.
        late = collect(aborted.run(state), aborted.prompt_length_B)
        assert row_of(late, 0) == row_of(run(target, drafter, [prompt[:3]]), 0)


LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + CHUNK // 2)


def recorded_context(lengths: tuple[int, ...], max_cycles: int):
    """(features, tokens, lengths, ids) that a stub absorbed, and the true features of those ids."""
    target = tiny_target()
    prompts = random_prompts(lengths, seed=1)
    plain = run(target, None, prompts)
    script = [a + b for a, b in zip(prompts, plain.token_ids, strict=True)]
    drafter = stub(target, script, [ORACLE, 3, 1, NEVER][: len(prompts)])
    request = make_request(target, drafter, prompts, max_new_tokens=NEW, **OPTIONS)
    state = request.run(request.prefill(), max_cycles)
    _, truth = target_forward(target, np.asarray(state.tokens_BS), TAPS)
    return state, np.asarray(truth)


@pytest.mark.parametrize("max_cycles", [0, 1, 4])
def test_the_drafter_gets_the_features_of_all_chunks_and_no_pads(max_cycles: int) -> None:
    state, truth = recorded_context(LENGTHS, max_cycles)
    committed = np.asarray(state.cache.length_B)
    if max_cycles == 0:
        assert committed.tolist() == list(LENGTHS)
    else:  # accepted drafts in, rejected ones and the bonus token out
        assert (committed - LENGTHS).tolist() == [n * max_cycles for n in (8, 4, 2, 1)]
    np.testing.assert_array_equal(state.draft["length_B"], committed)
    for row, length in enumerate(committed):
        mine = np.asarray(state.draft["features_BSM"])[row, :length]
        np.testing.assert_allclose(mine, truth[row, :length], atol=1e-4, rtol=0)
        tokens = np.asarray(state.draft["tokens_BS"])[row, :length]
        np.testing.assert_array_equal(tokens, np.asarray(state.tokens_BS)[row, :length])


@pytest.mark.parametrize("kind", ["dflash", "stub", "plain"])
def test_pads_never_reach_a_result(kind: str) -> None:
    """Other ids in the padding change nothing, bit for bit: not ids, acceptance or log-probs."""
    target = tiny_target()
    prompts = random_prompts(LENGTHS, seed=1)
    script = [prompt + [0] * NEW for prompt in prompts]
    drafter = {"dflash": tiny_drafter(), "stub": stub(target, script, 3), "plain": None}[kind]
    request = make_request(target, drafter, prompts, max_new_tokens=NEW, **OPTIONS)
    noisy = request.tokens_BS.copy()
    for row, length in zip(noisy, LENGTHS, strict=True):
        row[length:] = np.random.default_rng(length).integers(0, 127, SLOTS - length)
    other = dataclasses.replace(request, tokens_BS=noisy)
    outs = [collect(r.run(r.prefill()), r.prompt_length_B) for r in (request, other)]
    assert outs[0] == outs[1]


@pytest.mark.parametrize("length", [*LENGTHS, 1, 2 * CHUNK])
def test_chunked_prefill_gives_the_tokens_of_one_pass(length: int) -> None:
    prompts = random_prompts([length], seed=2)
    out = run(tiny_target(), None, prompts, max_new_tokens=5)
    assert out.token_ids[0] == greedy_reference(tiny_target(), prompts, 5)[0].tolist()


@pytest.mark.parametrize("kind", ["dflash", "stub", "plain"])
def test_each_row_of_a_batch_equals_its_own_run(kind: str) -> None:
    """Different budgets, lengths, stops and finish times, a prompt of one token among them."""
    target = tiny_target()
    prompts = random_prompts([1, 9, 28, 5], seed=3)
    plain = run(target, None, prompts)
    right = [3, ORACLE, 1, 6]
    script = [a + b for a, b in zip(prompts, plain.token_ids, strict=True)]
    budgets = [NEW, 3, 17, 0]
    stops = [(plain.token_ids[0][10],), (), (plain.token_ids[2][12],), ()]
    batch = {"dflash": tiny_drafter(), "stub": stub(target, script, right), "plain": None}[kind]
    together = run(target, batch, prompts, max_new_tokens=budgets, stop_token_ids=stops)
    for row in range(4):
        own = stub(target, [script[row]], right[row]) if kind == "stub" else batch
        alone = run(
            target,
            own,
            [prompts[row]],
            max_new_tokens=budgets[row],
            stop_token_ids=stops[row],
        )
        assert row_of(together, row) == row_of(alone, 0)
        if kind == "stub":
            wanted = expected(plain.token_ids[row], budgets[row], stops[row], right[row])
            assert row_of(together, row)[:3] == wanted
    order = [2, 0, 3, 1]
    if kind == "stub":
        batch = stub(target, [script[i] for i in order], [right[i] for i in order])
    shuffled = run(
        target,
        batch,
        [prompts[i] for i in order],
        max_new_tokens=[budgets[i] for i in order],
        stop_token_ids=[stops[i] for i in order],
    )
    assert [row_of(shuffled, k) for k in range(4)] == [row_of(together, i) for i in order]


def test_finished_rows_are_frozen() -> None:
    target = tiny_target()
    prompts = random_prompts([5, 9, 28, 5], seed=4)
    plain = run(target, None, prompts)
    script = [a + b for a, b in zip(prompts, plain.token_ids, strict=True)]
    request = make_request(
        target, stub(target, script, 3), prompts, max_new_tokens=[NEW, 2, 4, 0], **OPTIONS
    )
    state = request.run(request.prefill(), 2)
    before = jax.device_get(state)
    after = jax.device_get(request.run(state))
    assert (after.finish_B != 0).all()
    assert (after.cycles_B[1:] == before.cycles_B[1:]).all()
    assert (after.accepted_BS[1:] == before.accepted_BS[1:]).all()
    assert (after.cache.length_B[1:] == before.cache.length_B[1:]).all()
    for row in (1, 2, 3):  # committed entries, up to the anchor, are what they were
        end = before.cache.length_B[row]
        assert (after.tokens_BS[row, : end + 1] == before.tokens_BS[row, : end + 1]).all()
        old_arrays, new_arrays = (s.cache.k + s.cache.v for s in (before, after))
        for old, new in zip(old_arrays, new_arrays, strict=True):
            assert (old[row, :, :end] == new[row, :, :end]).all()


@pytest.mark.parametrize("room", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("kind", ["dflash", "oracle", "never", "plain"])
def test_context_limit_inside_a_block(room: int, kind: str) -> None:
    """Exactly the tokens that fit, finish = length; no write is shifted."""
    target = tiny_target()
    prompts = random_prompts([CONTEXT - room], seed=room)
    wanted = greedy_reference(target, prompts, room)[0].tolist()
    right = {"oracle": ORACLE, "never": NEVER}.get(kind, 0)
    script = [prompts[0] + wanted + [0] * BLOCK]
    drafter = {"dflash": tiny_drafter(), "plain": None}.get(
        kind, stub(target, script, right, num_slots=SLOTS)
    )
    out = run(target, drafter, prompts, max_new_tokens=NEW)
    assert (out.token_ids[0], out.finish_reasons) == (wanted, ["length"])


@pytest.mark.parametrize("budget", [10**6, 2**31 - 1, 2**40])
def test_a_huge_budget_means_up_to_the_context_limit(budget: int) -> None:
    prompts = random_prompts([CONTEXT - 3], seed=3)
    out = run(tiny_target(), None, prompts, max_new_tokens=budget)
    assert len(out.token_ids[0]) == 3


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"prompts\[1\].*{CONTEXT}.*max_position_embeddings"):
        run(tiny_target(), None, [[1], [1] * CONTEXT])


def test_block_size_above_the_trained_one_warns() -> None:
    target, drafter, prompts = tiny_target(), tiny_drafter(), random_prompts([5])
    with pytest.warns(UserWarning, match=f"block_size 10 is above the {BLOCK}"):
        request = make_request(target, drafter, prompts, block_size=10, stop_token_ids=())
    assert request.spec.block_size == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (2, BLOCK, None):
            request = make_request(target, drafter, prompts, block_size=size, stop_token_ids=())
            assert request.spec.block_size == (size or BLOCK)


def test_block_size_1_is_plain_decoding() -> None:
    target, prompts = tiny_target(), random_prompts([5])
    request = make_request(target, tiny_drafter(), prompts, block_size=1, stop_token_ids=())
    assert request.spec.proposer is None
    out = run(target, tiny_drafter(), prompts, block_size=1)
    assert row_of(out, 0) == row_of(run(target, None, prompts), 0)
    assert set(out.acceptance_lengths[0]) == {1}


def test_smaller_blocks_give_the_same_ids() -> None:
    target, prompts = tiny_target(), random_prompts([5])
    out = run(target, tiny_drafter(), prompts, block_size=3)
    assert out.token_ids == run(target, None, prompts).token_ids
    assert max(out.acceptance_lengths[0]) <= 3


def test_block_sizes_that_contradict_each_other_are_refused() -> None:
    config = tiny_drafter().config.to_hf()
    assert DrafterConfig.from_hf(config).block_size == BLOCK
    for where in ("top level", "nested"):
        other = {**config, "dflash_config": dict(config["dflash_config"])}
        (other if where == "top level" else other["dflash_config"])["block_size"] = 5
        with pytest.raises(ConfigError, match=r"block_size.*(5.*8|8.*5)"):
            DrafterConfig.from_hf(other)
    for keep in ("top level", "nested"):
        one = {**config, "dflash_config": dict(config["dflash_config"])}
        del (one if keep == "nested" else one["dflash_config"])["block_size"]
        assert DrafterConfig.from_hf(one).block_size == BLOCK


def test_drafters_of_another_layout_are_refused() -> None:
    config = tiny_drafter().config.to_hf()
    nested = {**config["dflash_config"], "predict_from_slot_0": True}
    with pytest.raises(ConfigError, match="predict_from_slot_0"):
        DrafterConfig.from_hf({**config, "dflash_config": nested})
    with pytest.raises(ConfigError, match="Eagle3DraftModel"):
        DrafterConfig.from_hf({**config, "architectures": ["Eagle3DraftModel"]})


def test_a_hybrid_target_is_refused() -> None:
    config = {**tiny_target().config.to_hf(), "model_type": "qwen3_next"}
    with pytest.raises(ConfigError, match=r"qwen3_next.*roll back"):
        TargetConfig.from_hf(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: 0"),
        ({"block_size": 4, "drafter": None}, "block_size: 4 needs a drafter"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1"),
        ({"max_new_tokens": [1, 2]}, "max_new_tokens: 2 values for 1 prompts"),
        ({"stop_token_ids": [500]}, "stop_token_ids: 500 .* 128"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 .* 128"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids: 1\.5 .* 128"),
        ({"prompts": []}, "at least one"),
        ({"prompts": [[]]}, r"prompts\[0\]: empty"),
        ({"prompts": [[1, 128]]}, "token id 128 .* 128"),
        ({"prompts": [[-1]]}, "token id -1 .* 128"),
        ({"draft_policy": "sampled"}, "draft_policy: 'sampled'"),
        ({"num_slots": 40}, "num_slots: 40"),
        ({"num_slots": 132}, "num_slots: 132 .* 8"),
        ({"prefill_chunk": 0}, "prefill_chunk: 0"),
        ({"prefill_chunk": -8}, "prefill_chunk: -8"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    drafter = options.get("drafter", tiny_drafter())
    rest = {k: v for k, v in options.items() if k not in ("prompts", "drafter")}
    with pytest.raises(ValueError, match=message):
        run(tiny_target(), drafter, options.get("prompts", [[1, 2, 3]]), **rest)


@pytest.mark.parametrize("option", ["presence_penalty", "logit_bias", "grammar", "min_p"])
def test_unknown_options_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        generate_ids(tiny_target(), None, [[1]], **{option: 1.0})


@pytest.mark.parametrize("chunk", [7, 32, 100, 256])
def test_slot_buckets_are_few_and_multiples_of_the_chunk(chunk: int) -> None:
    sizes = {slot_bucket(needed, chunk) for needed in range(1, 4097)}
    assert all(size % chunk == 0 for size in sizes)
    assert len(sizes) <= 11
    for needed in range(1, 4097, 13):
        assert needed <= slot_bucket(needed, chunk) <= max(256, 1.5 * needed) + chunk


def test_any_prefill_chunk_gives_the_same_ids() -> None:
    prompts = random_prompts([23])
    odd = run(tiny_target(), None, prompts, prefill_chunk=7, num_slots=None, max_new_tokens=4)
    assert odd.token_ids == run(tiny_target(), None, prompts, max_new_tokens=4).token_ids


def test_a_drafter_that_does_not_fit_is_refused() -> None:
    target = tiny_target()
    config = TargetConfig.tiny("qwen3", vocab_size=64, hidden_size=16)
    other = Target(config, TargetModel(config, jnp.float32), params={})
    with pytest.raises(ValueError, match=r"hidden_size: drafter 32, target 16.*vocab_size"):
        init_drafter(other, tiny_drafter().config)
    stopping = dataclasses.replace(target, stop_token_ids=(127,))
    with pytest.raises(ValueError, match="mask_token_id: 127"):
        init_drafter(stopping, tiny_drafter().config)


def test_dtype_of_the_ids_does_not_matter() -> None:
    prompts = random_prompts([6])
    for variant in (jnp.array(prompts), np.array(prompts, np.uint8), [tuple(prompts[0])]):
        assert run(tiny_target(), None, variant) == run(tiny_target(), None, prompts)
