"""Acceptance of decoded prompts, against counts by hand."""

import pytest

from dflash_jax.generation import GenerationOutput
from train.acceptance import summarize_acceptance

LOOP = [7, 8] * 10
TEXT = [1, 4, 9, 16, 25, 36, 49, 64, 81, 100]


def test_rates_by_hand() -> None:
    """Two batches; the last cycle of the first row was cut, so it counts nowhere."""
    outputs = [
        GenerationOutput(
            [TEXT, LOOP], [[3, 1, 4, 1], [4, 4, 4, 4, 3]], ["stop"] * 2, [True, False]
        ),
        GenerationOutput([TEXT[:4]], [[1, 2]], ["length"], [False]),
    ]
    result = summarize_acceptance(outputs, block_size=4)
    assert result["prompts"] == 3
    assert result["looping"] == 1
    assert result["stopped"] == 2
    assert result["tokens"] == 34
    assert result["cycles"] == 10
    assert result["tau"] == pytest.approx((8 + 19 + 3) / 10)
    assert result["tau_other"] == pytest.approx(11 / 5)
    assert result["tau_looping"] == pytest.approx(19 / 5)
    # Cycles of 3 1 4 | 1 2: slot 1 is accepted in 3, slot 2 in 2, slot 3 in 1.
    assert result["acceptance_by_slot_other"] == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert result["acceptance_by_slot"] == pytest.approx([8 / 10, 7 / 10, 5 / 10])
    assert 1 + sum(result["acceptance_by_slot"]) == pytest.approx(result["tau"])
    assert result["histogram"] == {"1": 2, "2": 1, "3": 2, "4": 5}
    assert result["histogram_other"] == {"1": 2, "2": 1, "3": 1, "4": 1}


def test_intervals_are_over_prompts_and_the_same_every_time() -> None:
    outputs = [
        GenerationOutput([TEXT], [[1 + i % 4] * (5 + i % 3)], ["length"], [False])
        for i in range(200)
    ]
    result = summarize_acceptance(outputs, block_size=4)
    low, high = result["tau_interval"]
    assert low < result["tau"] < high
    # The mean of 200 prompts of variance 1.25: two standard errors either way.
    assert high - low == pytest.approx(4 * (1.25 / 200) ** 0.5, rel=0.15)
    assert summarize_acceptance(outputs, block_size=4) == result


def test_without_a_whole_cycle() -> None:
    result = summarize_acceptance([GenerationOutput([[3]], [[]], ["stop"], [False])], 4)
    assert result["prompts"] == 1
    for name in ("tau", "tau_interval", "tau_other", "tau_looping", "acceptance_by_slot"):
        assert result[name] is None
    assert result["histogram"] == {}
