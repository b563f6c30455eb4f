"""Continuous batching at a fixed batch size: every prompt equals its own run."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.generation import Request
from dflash_jax.refill import Job, generate_many

SLOTS = 128


@pytest.fixture(scope="module")
def models():
    target = dj.init_target(dj.TargetConfig.tiny())
    config = dj.DrafterConfig.for_target(
        target.config, mask_token_id=39, num_layers=1, num_taps=1, block_size=4
    )
    return target, dj.init_drafter(target, config)


def jobs(count: int, temperature: float = 0.0) -> list[Job]:
    rng = np.random.default_rng(0)
    return [
        Job(
            i,
            rng.integers(0, 39, rng.integers(1, 40)).tolist(),
            dj.SamplingParams(temperature, seed=i),
            int(rng.integers(0, 30)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_prompt_equals_its_own_run(models, temperature):
    target, drafter = models
    todo = jobs(11, temperature)
    many = {}
    for job, out in generate_many(
        target,
        drafter,
        iter(todo),
        batch_size=3,
        num_slots=SLOTS,
        cycles_per_step=3,
        stop_token_ids=(5, 9),
    ):
        assert job.key not in many
        many[job.key] = out
    assert sorted(many) == list(range(11))
    for job in todo:
        alone = dj.generate_ids(
            target,
            drafter,
            [job.prompt_ids],
            sampling=job.sampling,
            max_new_tokens=job.max_new_tokens,
            stop_token_ids=(5, 9),
        )
        assert many[job.key] == alone
    assert {out.finish_reasons[0] for out in many.values()} == {"stop", "length"}


def test_fewer_prompts_than_rows_and_none_at_all(models):
    target, _ = models
    assert len(list(generate_many(target, None, jobs(2), batch_size=5, num_slots=SLOTS))) == 2
    assert list(generate_many(target, None, [], batch_size=5, num_slots=SLOTS)) == []


def test_a_prompt_that_does_not_fit_is_refused_and_earlier_results_stand(models):
    target, _ = models
    long = Job("long", [1] * 120, dj.SamplingParams(), 30)
    run = generate_many(target, None, [*jobs(3), long], batch_size=1, num_slots=SLOTS)
    assert [next(run)[0].key for _ in range(2)] == [0, 1]
    assert next(run)[0].key == 2
    with pytest.raises(ValueError, match=r"num_slots: 128 .* at least 151"):
        next(run)


def test_a_richer_sampling_mode_later_in_the_run(models):
    target, _ = models
    hot = Job("hot", [1, 2], dj.SamplingParams(1.0, top_k=3, seed=4), 20)
    run = generate_many(target, None, [*jobs(2), hot], batch_size=1, num_slots=SLOTS)
    out = {job.key: output for job, output in run}
    alone = dj.generate_ids(
        target, None, [hot.prompt_ids], sampling=hot.sampling, max_new_tokens=20
    )
    assert out["hot"].token_ids == alone.token_ids


def test_what_the_jobs_raise_waits_for_the_rows_in_work(models):
    target, _ = models

    def source() -> Iterator[Job]:
        yield from jobs(5)
        raise RuntimeError("no more")

    run = generate_many(target, None, source(), batch_size=2, num_slots=SLOTS)
    assert sorted(next(run)[0].key for _ in range(5)) == list(range(5))
    with pytest.raises(RuntimeError, match="no more"):
        next(run)


def test_the_device_is_at_work_while_the_caller_is(models, monkeypatch):
    """Between two results, and while jobs are read, cycles that were dispatched are under way."""
    target, _ = models
    log: list[Any] = []
    run = Request.run

    def logged_run(self, state, cycles):
        log.append("run")
        return run(self, state, cycles)

    def source() -> Iterator[Job]:
        for i in range(9):  # no two end in the same cycle
            log.append("read")
            yield Job(i, [1 + i], dj.SamplingParams(), 4 + 3 * i)

    monkeypatch.setattr(Request, "run", logged_run)
    count = 0
    options: dict[str, Any] = {"cycles_per_step": 1, "refill_size": 1, "stop_token_ids": ()}
    for _ in generate_many(target, None, source(), batch_size=3, num_slots=SLOTS, **options):
        log.append("result")
        count += 1
    assert count == 9
    # The first batch and one group are read as the first prefill runs, the others after a run.
    assert log[:5] == ["read"] * 4 + ["run"]
    assert log.count("read") == 9
    results = [i for i, entry in enumerate(log) if entry == "result"]
    last_run = max(i for i, entry in enumerate(log) if entry == "run")
    for i in results:
        if i < last_run:
            assert next(entry for entry in reversed(log[:i]) if entry != "result") == "run"
    reads = [i for i, entry in enumerate(log) if entry == "read" and i > 4]
    assert all(log[i - 1] in ("run", "result") for i in reads)


def test_an_abandoned_run_leaves_no_thread(models):
    target, _ = models
    before = threading.active_count()
    some: Any = generate_many(target, None, jobs(9), batch_size=3, num_slots=SLOTS)
    next(some)
    some.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_any_refill_size_gives_the_same(models, size):
    target, _ = models
    options = {"batch_size": 3, "num_slots": SLOTS, "cycles_per_step": 4}
    expected = {j.key: out for j, out in generate_many(target, None, jobs(8), **options)}
    got = generate_many(target, None, jobs(8), refill_size=size, **options)
    assert {j.key: out for j, out in got} == expected
