"""`python -m infer.bench`: its arithmetic, its inputs, and the forced acceptance."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import infer.bench as command
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter, init_drafter
from dflash_jax.generation import (
    GenerationOutput,
    SamplingParams,
    collect,
    generate_ids,
    make_request,
)
from dflash_jax.target import Target, TargetModel, init_target
from infer import comparison
from infer.bench_inputs import PROMPTS, load_models, load_prompts, read_prompts
from infer.synthetic import SyntheticAcceptance, acceptance_probability, synthetic_drafter
from infer.timing import (
    TimedRun,
    copy_bandwidth,
    cycle_weight_bytes,
    matmul_rate,
    step_weight_bytes,
)
from tests.conftest import Golden
from tests.rigs import BLOCK, random_prompts, tiny_drafter, tiny_target
from tests.text_rigs import text_target

TINY = ["--random_weights=tiny", "--prompt_length=5", "--max_new_tokens=20", "--block_size=4"]
TINY += ["--repeats=2", "--warmup=0"]


def parse(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    command.define_flags(values)
    values(["bench", *arguments])
    return values


@pytest.fixture(autouse=True)
def small_device_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "copy_bandwidth", lambda _: copy_bandwidth(2**16))
    monkeypatch.setattr(command, "matmul_rate", lambda _, dtype: matmul_rate(16, dtype))


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "results.json"
    options = [*TINY, *arguments, f"--output={file}"]
    assert command.run(parse(*options), ["bench.py", *options]) == 0
    return json.loads(file.read_text())


# --- the record


def test_plain_and_speculative_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(tmp_path, "--batch_size=2")
    printed = capsys.readouterr().out
    assert results["command"][:4] == ["python", "-m", "infer.bench", "--random_weights=tiny"]
    assert {"python", "jax", "jaxlib", "flax"} <= set(results["versions"])
    assert results["date"].startswith("20")
    assert results["hardware"]["backend"] == jax.default_backend()
    config = results["config"]
    assert config["batch_size"] == 2
    assert config["prompt_tokens"] == [5, 5]
    assert config["dtype"] == "float32"
    assert config["block_size"] == 4
    assert config["context"] == 128
    assert results["synthetic_acceptance"] is None
    for way in ("plain", "speculative"):
        part = results[way]
        assert part["tokens"] == 40
        for field in ("step_ms", "prefill_ms", "tokens_per_second", "decode_tokens_per_second"):
            spread = part[field]
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        bandwidth = results["device"]["copy_bytes_per_second"]
        assert part["floor_ms"] == pytest.approx(1e3 * part["weight_bytes"] / bandwidth)
        assert part["times_floor"] == pytest.approx(part["step_ms"]["median"] / part["floor_ms"])
    assert results["plain"]["steps"] == 19
    assert results["plain"]["mean_acceptance_length"] == 1
    assert results["speculative"]["steps"] <= 19
    cost = results["speculative"]["step_ms"]["median"] / results["plain"]["step_ms"]["median"]
    assert results["comparison"]["cycle_cost_in_steps"] == pytest.approx(cost)
    assert results["comparison"]["break_even_acceptance"] == pytest.approx(cost)
    assert results["identical"] == {"rows": 2, "different": 0, "fraction": 1.0}
    assert results["device"]["matmul_flops_per_second"] > 0
    for words in ("break-even", "identical rows: 2 of 2", "times the floor", "GB/s", "TFLOP/s"):
        assert words in printed
    assert "SYNTHETIC" not in printed


def test_synthetic_acceptance_is_said_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(tmp_path, "--synthetic_acceptance=4", "--context=128")
    assert "SYNTHETIC acceptance, forced to a mean of 4.0" in capsys.readouterr().out
    assert results["synthetic_acceptance"] == 4.0
    assert results["speculative"]["mean_acceptance_length"] == 4.0  # of a block of 4: all
    assert results["speculative"]["steps"] == 5  # 19 tokens
    assert "identical" not in results


def test_rates_of_a_made_up_run() -> None:
    """Two repeats of two batches, by hand."""
    output = GenerationOutput([[1, 2, 3, 4, 5]], [[2, 1, 1]], ["length"], [True])
    other = GenerationOutput([[1, 2, 3]], [[2]], ["stop"], [False])
    repeats = [
        [TimedRun(output, 0.1, 0.3, 3), TimedRun(other, 0.1, 0.1, 1)],
        [TimedRun(output, 0.2, 0.5, 3), TimedRun(other, 0.2, 0.3, 1)],
    ]
    summary = comparison.summarize(repeats, weight_bytes=2e6, bandwidth=1e9)
    assert summary["steps"] == 4
    assert summary["tokens"] == 8
    assert summary["step_ms"] == pytest.approx({"median": 150, "min": 100, "max": 200})
    assert summary["prefill_ms"] == pytest.approx({"median": 150, "min": 100, "max": 200})
    rate = summary["decode_tokens_per_second"]  # 6 tokens: two came from the prefills
    assert rate == pytest.approx({"median": 11.25, "min": 7.5, "max": 15})
    assert summary["tokens_per_second"]["max"] == pytest.approx(8 / 0.6)
    assert summary["mean_acceptance_length"] == pytest.approx(5 / 3)  # the cut cycle is left out
    assert summary["floor_ms"] == pytest.approx(2)
    assert summary["times_floor"] == pytest.approx(75)


def test_plain_only_and_real_folders(tmp_path: Path, golden: Golden) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2, 3]}\n\n{"prompt": [4]}\n{"prompt": [5, 6]}\n')
    options = [f"--target={golden.path('qwen3', 'target')}", f"--prompt_file={prompts}"]
    options += ["--max_new_tokens=8", "--batch_size=2", "--repeats=1", "--warmup=0"]
    plain = command.benchmark(parse(*options))
    assert "speculative" not in plain
    assert plain["config"]["drafter"] is None
    assert plain["config"]["batches"] == 2
    assert plain["plain"]["tokens"] == 4 * 8  # the last batch is filled up
    both = command.benchmark(parse(*options, f"--drafter={golden.path('qwen3', 'drafter')}"))
    assert both["identical"]["fraction"] == 1.0
    assert both["config"]["context"] == 128


def test_the_cache_is_the_same_for_both_ways() -> None:
    """Near a bucket's end the block's headroom would give the drafter a larger cache."""
    target, drafter = tiny_target(max_position_embeddings=512), tiny_drafter()
    options = parse(*TINY, "--max_new_tokens=120")
    plain, speculative = command._requests(options, target, drafter, [[[1, 2, 3]], [[4] * 40]])
    shapes = {request.tokens_BS.shape for request in (*plain, *speculative)}
    assert shapes == {(1, 256)}


def test_rows_that_part_are_counted_with_their_margin() -> None:
    target, prompts = tiny_target(), random_prompts([3, 4, 5])
    requests = [
        make_request(
            target,
            None,
            prompts,
            sampling=[SamplingParams(), SamplingParams(t, seed=1), SamplingParams(t, seed=2)],
            max_new_tokens=12,
            stop_token_ids=(),
        )
        for t in (0.0, 1.5)
    ]
    runs = [
        TimedRun(collect(r.run(r.prefill()), r.prompt_length_B), 1.0, 1.0, 11) for r in requests
    ]
    assert comparison.count_identical([runs[0]], [runs[1]]) == {
        "rows": 3,
        "different": 2,
        "fraction": 1 / 3,
    }
    margins = comparison.margins_where_parted(requests[:1], requests[1:])
    logged = [
        generate_ids(
            target,
            None,
            prompts,
            sampling=[SamplingParams(), SamplingParams(t, seed=1), SamplingParams(t, seed=2)],
            max_new_tokens=12,
            stop_token_ids=(),
            logprobs=True,
        )
        for t in (0.0, 1.5)
    ]
    expected = []
    for row in (1, 2):
        a, b = (np.array(out.token_ids[row]) for out in logged)
        first = int(np.argmax(a != b))
        expected.append(abs(logged[0].logprobs[row][first] - logged[1].logprobs[row][first]))
    assert margins == pytest.approx(expected)
    assert min(margins) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "target, random_weights: exactly one"),
        (["--target=x", "--random_weights=tiny"], "exactly one"),
        (["--random_weights=tiny", "--drafter=x"], "brings its own"),
        (["--random_weights=tiny", "--prompt_file=x"], "prompt_file: "),
        (["--target=nowhere"], "'nowhere' is neither"),
        ([*TINY, "--batch_size=0"], "batch_size: 0"),
        ([*TINY, "--block_size=1"], "block_size: 1 is plain"),
        ([*TINY, "--block_size=1", "--synthetic_acceptance=1"], "block_size: 1 is plain"),
        ([*TINY, "--synthetic_acceptance=4.5"], "synthetic_acceptance: 4.5 must lie in 1..4"),
        ([*TINY, "--synthetic_acceptance=0.5"], "synthetic_acceptance: 0.5"),
        ([*TINY, "--prompt_length=-1"], "prompt_length: -1 must be at least 1"),
        (["--target={golden}", "--prompt_file={binary}"], "binary.txt: not UTF-8 text"),
        ([*TINY, "--context=7"], "num_slots: 7"),
        ([*TINY, "--max_new_tokens=1"], "max_new_tokens: nothing is left"),
        ([*TINY, "--output=nowhere/x.json"], "output: nowhere is not a folder"),
        (["--target={golden}", "--synthetic_acceptance=2"], "no tokenizer"),
        (
            ["--target={golden}", "--prompt_file={ids}", "--synthetic_acceptance=2"],
            "synthetic_acceptance: a drafter",
        ),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    golden: Golden,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt": [1]}')
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\x00")
    paths = {"golden": golden.path("qwen3", "target"), "ids": ids, "binary": binary}
    filled = [a.format(**paths) for a in arguments]
    assert command.run(parse(*filled), ["bench.py"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


# --- inputs


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n  two \n")
    assert read_prompts(text) == ["one", "  two "]
    lines = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    lines.write_text(
        json.dumps({"prompt": "one", "id": 3}) + "\n" + json.dumps({"messages": chat}) + "\n"
    )
    assert read_prompts(lines) == ["one", chat]
    for bad, message in (
        ("", "no prompts"),
        ('{"prompt": "x"}\n{"text": "y"}', ":2: expected an object"),
        ('["x"]', ":1: expected an object"),
        ("{", ":1: not JSON"),
        ('{"prompt": "x", "messages": []}', ":1: expected an object"),
    ):
        lines.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_prompts(lines)


def test_built_in_prompts_go_through_the_chat_template() -> None:
    target = text_target()
    ids = load_prompts(parse("--target=x"), target)
    assert len(ids) == len(PROMPTS)
    assert target.tokenizer.decode(ids[0]).startswith("<|im_start|>user\n")
    bare = dataclasses.replace(
        target, tokenizer=text_target(chat_template=None).tokenizer, name="bare"
    )
    assert not bare.tokenizer.decode(load_prompts(parse("--target=x"), bare)[0]).startswith("<|")


def test_random_models_fit_each_other_and_repeat() -> None:
    (target, drafter), (again, _) = (load_models(parse(*TINY, "--seed=3")) for _ in range(2))
    assert drafter is not None
    assert drafter.config.num_target_layers == target.config.num_hidden_layers
    same = jax.tree.map(np.array_equal, target.params, again.params)
    assert all(jax.tree.leaves(same))
    assert load_models(parse(*TINY, "--dtype=bfloat16"))[0].model.dtype == jnp.bfloat16


# --- floors


def abstract_target(config: TargetConfig, dtype: str = "float32") -> Target:
    """Shapes only: nothing is compiled or run."""

    def init() -> Any:
        return init_target(config, dtype=dtype).params

    return Target(config, TargetModel(config, jnp.dtype(dtype)), jax.eval_shape(init))


def test_weight_bytes_are_those_a_step_reads() -> None:
    config = TargetConfig.tiny("qwen3")
    target = abstract_target(config)
    D, F, V, H = 32, 48, 40, 8
    attention = D * (4 + 2 * 2) * H + 4 * H * D + 2 * H
    layer = attention + 3 * D * F + 2 * D
    assert step_weight_bytes(target, 1) == 4 * (4 * layer + D + D * V)
    tied = abstract_target(dataclasses.replace(config, tie_word_embeddings=True))
    assert step_weight_bytes(tied, 1) == step_weight_bytes(target, 1)
    half = abstract_target(config, "bfloat16")
    assert step_weight_bytes(half, 1) == step_weight_bytes(target, 1) / 2
    drafter_config = DrafterConfig.for_target(config, mask_token_id=39, num_taps=1, num_layers=2)
    params = jax.eval_shape(lambda: init_drafter(target, drafter_config).params)
    drafter = Drafter(drafter_config, tiny_drafter().model, params)
    expected = 4.0 * (D * D + 2 * D + 2 * layer)  # fc, two norms, two layers of the same shape
    expected += step_weight_bytes(target, 8) + 4 * D * V
    assert cycle_weight_bytes(target, drafter, 8) == expected
    assert cycle_weight_bytes(tied, drafter, 8) == expected


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    target = abstract_target(TargetConfig.tiny("qwen3_moe"))
    experts = 4 * 4 * 4 * (3 * 32 * 16)  # bytes, layers, experts
    whole = step_weight_bytes(target, 10_000)
    one, two = (step_weight_bytes(target, tokens) for tokens in (1, 2))
    assert whole - one == pytest.approx(experts / 2)  # 2 of 4 experts
    assert whole - two == pytest.approx(experts / 4)


# --- forced acceptance


@pytest.mark.parametrize("tau", [1.0, 1.5, 3.0, 7.9, 16.0])
def test_the_probability_gives_the_mean(tau: float) -> None:
    p = acceptance_probability(tau, 16)
    assert 0 <= p <= 1
    assert math.fsum(p**k for k in range(16)) == pytest.approx(tau)


def test_the_schedule_has_the_mean_and_is_geometric() -> None:
    p = acceptance_probability(3.0, BLOCK)
    schedule = SyntheticAcceptance(tiny_proposer(), p, seed=5)
    cycles = np.broadcast_to(np.arange(2000, dtype=np.int32)[:, None], (2000, 4))
    counts = np.asarray(jax.vmap(schedule.forced_drafts)(cycles))
    assert counts.min() == 0
    assert counts.max() == BLOCK - 1
    # 8000 draws with a standard deviation below 2.3: 4 sigma is 0.1.
    assert abs(counts.mean() - 2.0) < 0.1
    assert abs((counts >= 1).mean() - p) < 0.03
    assert abs((counts >= 3).mean() - p**3) < 0.03
    assert len({tuple(column) for column in counts.T}) == 4
    other = SyntheticAcceptance(tiny_proposer(), p, seed=6)
    assert not np.array_equal(counts[0], other.forced_drafts(np.zeros(4, np.int32)))


def tiny_proposer():
    drafter = synthetic_drafter(tiny_drafter(), 2.0)
    assert isinstance(drafter.proposer, SyntheticAcceptance)
    return drafter.proposer.inner


def test_a_forced_run_commits_what_the_schedule_says() -> None:
    """Acceptance lengths are the schedule's until the budget, whatever the drafts are; ids, counts
    and limits stay consistent."""
    target, prompts = tiny_target(), random_prompts([3, 5])
    drafter = synthetic_drafter(tiny_drafter(), 3.0, seed=1)
    schedule = drafter.proposer
    assert isinstance(schedule, SyntheticAcceptance)
    out = generate_ids(target, drafter, prompts, max_new_tokens=40, stop_token_ids=())
    cycles = max(len(row) for row in out.acceptance_lengths)
    forced = np.array(
        [schedule.forced_drafts(np.full(2, i, np.int32)) for i in range(cycles)], np.int32
    )
    for row, (lengths, ids) in enumerate(zip(out.acceptance_lengths, out.token_ids, strict=True)):
        assert len(ids) == 40 == 1 + sum(lengths)
        whole = (forced[: len(lengths), row] + 1).tolist()
        assert lengths[:-1] == whole[:-1]
        assert lengths[-1] <= whole[-1]
    assert out.acceptance_lengths[0] != out.acceptance_lengths[1]


def test_the_drafter_works_in_a_forced_run() -> None:
    """Its drafts are verified: another drafter leads to another text."""
    target, prompts = tiny_target(), random_prompts([3, 5])
    texts = []
    for scale in (1.0, -1.0):
        drafter = tiny_drafter()
        params = jax.tree.map(lambda p, s=scale: p * s, drafter.params)
        forced = synthetic_drafter(dataclasses.replace(drafter, params=params), 4.0)
        out = generate_ids(target, forced, prompts, max_new_tokens=30, stop_token_ids=())
        texts.append(out.token_ids)
    assert texts[0] != texts[1]


def test_without_forcing_nothing_changes() -> None:
    """The same drafter, forced and free: the free run is the plain one."""
    target, prompts = tiny_target(), random_prompts([3, 5])
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_token_ids": ()}
    plain = generate_ids(target, None, prompts, **options)
    assert generate_ids(target, tiny_drafter(), prompts, **options).token_ids == plain.token_ids
    forced = generate_ids(target, synthetic_drafter(tiny_drafter(), 5.0), prompts, **options)
    assert forced.token_ids != plain.token_ids
