"""Rows of the pitfall list, part Sampling: lossless at any temperature, keyed noise, filters."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dflash_jax.attention import MASKED
from dflash_jax.decode import DecodeParams, prefill, run_cycles
from dflash_jax.generation import CustomDrafter, GenerationOutput, SamplingParams, make_request
from dflash_jax.sampling import (
    Sampling,
    SamplingMode,
    filter_logits,
    gumbel_noise,
    pick_tokens,
)
from dflash_jax.target import Target, target_forward
from tests.rigs import (
    NEW,
    ORACLE,
    Scripted,
    expected,
    random_prompts,
    row_of,
    run,
    stub,
    tiny_drafter,
    tiny_target,
)

WARM = SamplingParams(temperature=0.7, seed=11)
HOT = SamplingParams(temperature=1.5, seed=12)
NUCLEUS = SamplingParams(temperature=1.0, top_k=20, top_p=0.8, seed=13)


def sampling_of(temperature=(1.0,), top_k=(0,), top_p=(1.0,), seed=(0,)) -> Sampling:
    return Sampling(
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(seed, np.uint32),
    )


# Filters against NumPy


def numpy_kept(logits: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """Kept ids of one position, and how far top-p is from a boundary: float32 may round over it."""
    kept = np.ones(logits.shape, bool)
    if top_k:
        kept &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p >= 1:
        return kept, 1.0
    weights = np.where(kept, np.exp(logits.astype(np.float64) - logits.max()), 0)
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum((weights / weights.sum())[order])
    last = int(np.argmax(cumulative >= top_p))
    kept &= logits >= logits[order[last]]
    return kept, float(np.abs(cumulative - top_p).min())


filtered = jax.jit(filter_logits)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=8, max_size=8),
    st.sampled_from([0.25, 1.0, 1.7]),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.99, 1.0]),
)
def test_filters_equal_numpy(values, scale, top_k, top_p) -> None:
    """Few distinct values, so that ties at the k-th and at the last nucleus member are common."""
    logits = np.array(values, np.float32) * np.float32(scale)
    kept, distance = numpy_kept(logits, top_k, top_p)
    assume(distance > 1e-5)
    got = np.asarray(filtered(logits[None, None], np.array([top_k]), np.array([top_p])))[0, 0]
    np.testing.assert_array_equal(got > MASKED, kept)
    np.testing.assert_array_equal(got[kept], logits[kept])
    assert kept[logits.argmax()]


def test_ties_stay_in() -> None:
    logits = np.array([[[2.0, 5.0, 5.0, 2.0, 1.0]]], np.float32)
    kept = np.asarray(filter_logits(logits, np.array([1]), np.array([1.0])))[0, 0] > MASKED
    assert kept.tolist() == [False, True, True, False, False]
    kept = np.asarray(filter_logits(logits, np.array([3]), np.array([1.0])))[0, 0] > MASKED
    assert kept.tolist() == [True, True, True, True, False]
    kept = np.asarray(filter_logits(logits, np.array([0]), np.array([0.1])))[0, 0] > MASKED
    assert kept.tolist() == [False, True, True, False, False]


def test_filters_differ_by_row() -> None:
    logits = np.tile(np.array([4.0, 3.0, 2.0, 1.0], np.float32), (3, 2, 1))
    got = np.asarray(filter_logits(logits, np.array([0, 2, 0]), np.array([1.0, 1.0, 0.5])))
    assert (got > MASKED).sum(-1).tolist() == [[4, 4], [2, 2], [1, 1]]


# Picking


def test_a_richer_mode_gives_the_same_tokens() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 50)).astype(np.float32) * 3
    positions = np.arange(12).reshape(4, 3)
    greedy = sampling_of([0.0] * 4, [5, 0, 3, 0], [0.9, 0.5, 1, 1], [1, 2, 3, 4])
    wanted = logits.argmax(-1)
    for mode in SamplingMode:
        np.testing.assert_array_equal(pick_tokens(logits, positions, greedy, mode), wanted)
    warm = sampling_of([0.5, 1.0, 2.0, 0.0], [0] * 4, [1.0] * 4, [1, 2, 3, 4])
    np.testing.assert_array_equal(
        pick_tokens(logits, positions, warm, SamplingMode.SAMPLE),
        pick_tokens(logits, positions, warm, SamplingMode.FILTER),
    )


def test_order_is_temperature_then_top_k_then_top_p() -> None:
    """A token is the argmax of filtered(logits / T) plus the noise of its seed and position."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(2, 40, 8)) * 2).astype(np.float32)
    positions = np.arange(80).reshape(2, 40)
    for temperature, top_k, top_p in ((0.6, 4, 0.7), (2.5, 6, 0.8), (1.3, 0, 0.4)):
        sampling = sampling_of([temperature] * 2, [top_k] * 2, [top_p] * 2, [5, 6])
        got = np.asarray(pick_tokens(logits, positions, sampling, SamplingMode.FILTER))
        noise = np.asarray(gumbel_noise(sampling.seed_B, positions, 8))
        for index in np.ndindex(2, 40):
            scaled = logits[index] / np.float32(temperature)
            kept, _ = numpy_kept(scaled, top_k, top_p)
            assert got[index] == np.where(kept, scaled + noise[index], -np.inf).argmax()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([7, 8], np.uint32), np.tile(np.arange(6), (2, 1))
    everywhere = np.asarray(gumbel_noise(seeds, positions, 5))
    alone = np.asarray(gumbel_noise(np.array([8], np.uint32), np.array([[4]]), 5))
    np.testing.assert_array_equal(alone[0, 0], everywhere[1, 4])
    flat = everywhere.reshape(-1)
    assert len(np.unique(flat)) == flat.size


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-38])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """No overflow on the way: the largest logit wins, negative ones included."""
    logits = np.array([[[-9.0, -3.0, -2.0, -7.0]], [[1.0, 20.0, 30.0, -5.0]]], np.float32)
    sampling = sampling_of([temperature] * 2, [0, 0], [1.0, 0.9], [1, 2])
    for mode in (SamplingMode.SAMPLE, SamplingMode.FILTER):
        got = pick_tokens(logits, np.zeros((2, 1), int), sampling, mode)
        assert np.asarray(got).tolist() == [[2], [2]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e300),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.5),
    ],
)
def test_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}: {value}")):
        SamplingParams(**{field: value})


# Invariance. All rows in one batch and with log-probs: few compilations serve every test.

SAMPLINGS = [WARM, NUCLEUS, SamplingParams(), HOT]
ALL: dict[str, Any] = {"sampling": SAMPLINGS, "logprobs": True}
ROWS = range(4)


@cache
def prompts() -> list[list[int]]:
    return random_prompts([5, 9, 1, 28], seed=6)


@cache
def plain() -> GenerationOutput:
    return run(tiny_target(), None, prompts(), **ALL)


def scripted(right: list[int]) -> CustomDrafter:
    script = [a + b for a, b in zip(prompts(), plain().token_ids, strict=True)]
    return stub(tiny_target(), script, right)


def test_sampling_changes_the_ids() -> None:
    greedy = run(tiny_target(), None, prompts()).token_ids
    assert [plain().token_ids[row] == greedy[row] for row in ROWS] == [False, False, True, False]


@pytest.mark.parametrize("right", [[ORACLE, 3, 0, 5], [0, ORACLE, 1, 3]], ids=str)
def test_same_seed_same_ids_whatever_the_stub(right: list[int]) -> None:
    out = run(tiny_target(), scripted(right), prompts(), **ALL)
    assert out.token_ids == plain().token_ids
    for row in ROWS:
        assert row_of(out, row)[:3] == expected(plain().token_ids[row], NEW, (), right[row])
        assert out.logprobs[row] == pytest.approx(plain().logprobs[row], abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"draft_policy": "coupled"}], ids=str)
def test_same_seed_same_ids_whatever_the_block_size_and_draft_policy(options: dict) -> None:
    out = run(tiny_target(), tiny_drafter(), prompts(), **ALL, **options)
    assert out.token_ids == plain().token_ids


@pytest.mark.parametrize("kind", ["stub", "plain"])
def test_an_early_stop_or_a_smaller_budget_gives_a_prefix(kind: str) -> None:
    drafter = scripted([ORACLE, 3, 0, 5]) if kind == "stub" else None
    stops = [(ids[20],) for ids in plain().token_ids]
    cut = run(tiny_target(), drafter, prompts(), **ALL, stop_token_ids=stops)
    budgets = [11, 0, 1, 9]
    short = run(tiny_target(), drafter, prompts(), **ALL, max_new_tokens=budgets)
    for row in ROWS:
        whole, logprobs = plain().token_ids[row], plain().logprobs[row]
        length = whole.index(stops[row][0]) + 1
        assert cut.token_ids[row] == whole[:length]
        assert cut.logprobs[row] == pytest.approx(logprobs[:length], abs=1e-4)
        assert short.token_ids[row] == whole[: budgets[row]]
        assert len(short.logprobs[row]) == budgets[row]


@pytest.mark.parametrize("kind", ["plain", "dflash"])
def test_same_seed_same_ids_whatever_neighbours(kind: str) -> None:
    drafter = tiny_drafter() if kind == "dflash" else None
    back = run(tiny_target(), drafter, prompts()[::-1], sampling=SAMPLINGS[::-1], logprobs=True)
    assert back.token_ids[::-1] == plain().token_ids
    for row in (0, 1) if kind == "plain" else (1,):  # row 0 alone runs in a cheaper mode
        alone = run(
            tiny_target(), drafter, [prompts()[row]], sampling=SAMPLINGS[row], logprobs=True
        )
        assert row_of(alone, 0) == row_of(back, 3 - row)


def test_different_seeds_differ() -> None:
    seeds = (0, 1, 2**31, 2**32 - 1)
    samplings = [SamplingParams(1.0, top_k=100, seed=seed) for seed in seeds]
    out = run(tiny_target(), None, [prompts()[0]] * 4, sampling=samplings, logprobs=True)
    assert len({tuple(ids) for ids in out.token_ids}) == 4
    assert len({tuple(ids[:3]) for ids in out.token_ids}) > 1


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    sampling = SamplingParams(5.0, top_k=1, seed=9)
    out = run(tiny_target(), None, prompts(), sampling=sampling, logprobs=True)
    assert out.token_ids == run(tiny_target(), None, prompts()).token_ids


def test_logprobs_are_the_targets() -> None:
    """One per returned token, natural, of the unmodified distribution."""
    padded = np.zeros((4, 128), np.int32)
    sequences = [a + b for a, b in zip(prompts(), plain().token_ids, strict=True)]
    for tokens, sequence in zip(padded, sequences, strict=True):
        tokens[: len(sequence)] = sequence
    logits, _ = target_forward(tiny_target(), padded)
    truth = np.asarray(jax.nn.log_softmax(logits))
    for row, ids in enumerate(plain().token_ids):
        at = np.arange(len(ids)) + len(prompts()[row]) - 1
        wanted = truth[row, at, ids]
        assert plain().logprobs[row] == pytest.approx(wanted, abs=1e-4)
    assert run(tiny_target(), None, prompts()).logprobs is None


# Distribution

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
DRAWS = 200_000  # a temperature
PROMPT = [3, 1, 4]
BATCHES: dict[int, list[tuple[float, ...]]] = {
    1: [(0.3,), (0.7,), (1.0,), (1.5,)],
    2: [(0.3, 1.0), (1.5, 0.7)],
    3: [(0.0, 0.7, 1.5), (0.3, 1.0, 0.0)],
    8: [(0.3, 0.7, 0.0, 1.0, 1.5, 0.7, 0.3, 1.0)],
}


@cache
def tiny8() -> Target:
    """Vocabulary 8, its distributions neither flat nor peaked."""
    target = tiny_target(
        "llama",
        vocab_size=8,
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
    )
    return dataclasses.replace(
        target, params=jax.tree.map(lambda p: p * (3 if p.ndim > 1 else 1), target.params)
    )


@cache
def exact_logits() -> np.ndarray:
    """[8, 8, T, V]: logits of the prompt followed by every pair of tokens."""
    sequences = [[*PROMPT, a, b] for a in range(8) for b in range(8)]
    logits, _ = target_forward(tiny8(), np.array(sequences))
    return np.asarray(logits, np.float64).reshape(8, 8, 5, 8)


def exact_probs(temperature: float) -> np.ndarray:
    """[8, 8, 8]: probability of each triple of first tokens."""
    logits = exact_logits() / temperature
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    first, second, third = probs[0, 0, 2], probs[:, 0, 3], probs[:, :, 4]
    return first[:, None, None] * second[:, :, None] * third


@partial(jax.jit, static_argnames=("spec", "width"))
def draw(spec, width, params, request, temperature_B, seeds_NB):
    """Whole generations, prefill and loop, for N batches of seeds: new tokens and cycles."""
    rows = seeds_NB.shape[1]

    def one(seeds_B):
        off = Sampling(
            temperature_B, jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.float32), seeds_B
        )
        state = run_cycles(spec, params, prefill(spec, params, *request, off), jnp.int32(99))
        return state.tokens_BS[:, len(PROMPT) : len(PROMPT) + width], state.cycles_B

    return jax.lax.map(one, seeds_NB, batch_size=2000)


def draw_triples(temperatures: tuple[float, ...], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """[draws, B, 3] tokens from a batch of `temperatures`, [draws, B] cycles; a stub guesses."""
    target, rows = tiny8(), len(temperatures)
    greedy = run(target, None, [PROMPT], max_new_tokens=3, num_slots=16, prefill_chunk=4)
    drafter = stub(target, [PROMPT + greedy.token_ids[0]] * rows, 3, 4, 16)
    assert isinstance(drafter.proposer, Scripted)
    drafter = CustomDrafter(
        dataclasses.replace(drafter.proposer, layer_ids=(0,), feature_size=8), drafter.params
    )
    request = make_request(
        target,
        drafter,
        [PROMPT] * rows,
        sampling=SamplingParams(1.0),
        max_new_tokens=3,
        stop_token_ids=(),
        num_slots=16,
        prefill_chunk=4,
    )
    arrays = request.tokens_BS, request.prompt_length_B, request.limit_B, request.stop_ids_BN
    seeds = np.arange(draws * rows, dtype=np.uint32).reshape(draws, rows)
    params = DecodeParams(target.params, drafter.params)
    tokens, cycles = draw(
        request.spec, 3, params, arrays, np.array(temperatures, np.float32), seeds
    )
    return np.asarray(tokens), np.asarray(cycles)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of counts against exact probabilities; rare cells are pooled."""
    counts, wanted = counts.reshape(-1), probs.reshape(-1) * counts.sum()
    rare = wanted < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    return float(chisquare(counts, wanted).pvalue)


def count_triples(tokens_N3: np.ndarray) -> np.ndarray:
    flat = tokens_N3 @ np.array([64, 8, 1])
    return np.bincount(flat, minlength=512).reshape(8, 8, 8)


@pytest.mark.parametrize("batch", BATCHES)
def test_distribution_is_the_targets(batch: int) -> None:
    """First token, joint first two, joint first three: across acceptance, bonus and next cycle."""
    counts = {temperature: np.zeros((8, 8, 8), int) for temperature in TEMPERATURES}
    per_temperature = sum(row.count(0.7) for row in BATCHES[batch])
    for temperatures in BATCHES[batch]:
        tokens, cycles = draw_triples(temperatures, DRAWS // per_temperature)
        for row, temperature in enumerate(temperatures):
            if temperature == 0:
                assert (tokens[:, row] == tokens[0, row]).all()
                assert (cycles[:, row] == 1).all()  # the stub knows the greedy tokens
            else:
                counts[temperature] += count_triples(tokens[:, row])
                assert set(np.unique(cycles[:, row])) == {1, 2}  # drafts accepted and rejected
    for temperature, seen in counts.items():
        probs = exact_probs(temperature)
        assert seen.sum() >= DRAWS // 2
        for axes in ((1, 2), (2,), ()):
            assert p_value(seen.sum(axes), probs.sum(axes)) > 1e-3, (temperature, axes)
        # The test can fail: a temperature 3 % off is another distribution.
        off = exact_probs(temperature * 1.03)
        assert p_value(seen.sum((2,)), off.sum((2,))) < 1e-6
