"""`python -m infer.main`: what it prints, and what it says when something does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

import infer.main as command
from dflash_jax.loading import load_drafter, load_target
from infer import SamplingParams, generate
from tests.conftest import ROOT, Golden
from tests.text_rigs import CHATML, as_transformers, byte_level

KEYS = {
    *("text", "token_ids", "acceptance_lengths", "mean_acceptance_length", "tokens_per_second"),
    *("finish_reason", "prompt_tokens"),
}


@pytest.fixture(scope="session")
def folders(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The golden Qwen3 pair (vocabulary 96), the target once with a tokenizer and its template,
    once with a tokenizer alone and once as it is."""
    base = tmp_path_factory.mktemp("models")
    symbols = bytes([10, *range(32, 91), *range(97, 123)])  # no [ to `: 89 ids with the special
    for name, template in (("chat", CHATML), ("text", None)):
        shutil.copytree(golden.path("qwen3", "target"), base / name)
        as_transformers(byte_level(symbols), template).save_pretrained(base / name)
    return {
        "chat": str(base / "chat"),
        "text": str(base / "text"),
        "ids": str(golden.path("qwen3", "target")),
        "drafter": str(golden.path("qwen3", "drafter")),
    }


def run(*arguments: str) -> int:
    values = flags.FlagValues()
    command.define_flags(values)
    values(["main", *arguments])
    return command.run(values)


def last_json(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_streams_then_summarises_then_prints_json(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--target={folders['chat']}", f"--drafter={folders['drafter']}"]
    arguments += ["--prompt=hello", "--system=be kind", "--max_new_tokens=30"]
    arguments += ["--compare_autoregressive", "--json"]
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    record = last_json(printed.out)
    assert set(record) == KEYS | {"plain_tokens_per_second", "identical"}
    target = load_target(folders["chat"])
    drafter = load_drafter(folders["drafter"], target)
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    out = generate(target, drafter, [chat], max_new_tokens=30)
    assert out.text is not None
    assert printed.out.startswith(out.text[0] + "\n")
    assert record["text"] == out.text[0]
    assert record["token_ids"] == out.token_ids[0]
    assert record["acceptance_lengths"] == out.acceptance_lengths[0]
    assert record["mean_acceptance_length"] == out.mean_acceptance_length > 1
    assert record["finish_reason"] == out.finish_reasons[0]
    assert record["identical"] is True
    assert record["tokens_per_second"] > 0
    assert record["plain_tokens_per_second"] > 0
    summary = printed.out.removeprefix(out.text[0])
    for words in (
        "tokens/s",
        "plain tokens/s",
        "speedup",
        "identical",
        "tau",
        "acceptance lengths",
    ):
        assert words in summary
    # The histogram has as many cycles as there were.
    bars = [line.split() for line in summary.splitlines() if "#" in line]
    assert sum(int(cycles) for _, cycles, _ in bars) == len(out.acceptance_lengths[0])


def test_sampling_flags_and_raw_text_without_a_drafter(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt=hi", "--max_new_tokens=12", "--json", "--dtype=float32"]
    arguments += ["--temperature=0.9", "--top_k=20", "--top_p=0.95", "--seed=3"]
    target = load_target(folders["chat"])
    sampling = SamplingParams(0.9, 20, 0.95, 3)
    raw = generate(target, None, ["hi"], sampling=sampling, max_new_tokens=12)
    records = []
    for extra in (["--target=" + folders["chat"], "--raw"], ["--target=" + folders["text"]]):
        assert run(*arguments, *extra) == 0
        out = capsys.readouterr().out
        records.append(last_json(out))
        assert set(records[-1]) == KEYS
        assert "tau" not in out
    assert [r["token_ids"] for r in records] == raw.token_ids * 2
    assert run(*arguments, "--target=" + folders["chat"], "--enable_thinking=false") == 0
    chat = [{"role": "user", "content": "hi"}]
    expected = generate(
        *(target, None, [chat]), sampling=sampling, max_new_tokens=12, enable_thinking=False
    )
    assert last_json(capsys.readouterr().out)["token_ids"] == expected.token_ids[0]


def test_block_size_and_policy_reach_the_loop(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--target={folders['text']}", f"--drafter={folders['drafter']}", "--prompt=ab"]
    arguments += ["--block_size=4", "--draft_policy=coupled", "--temperature=1", "--seed=2"]
    arguments += ["--max_new_tokens=12", "--json"]
    assert run(*arguments) == 0
    target = load_target(folders["text"])
    expected = generate(
        *(target, load_drafter(folders["drafter"], target), ["ab"]),
        sampling=SamplingParams(1.0, seed=2),
        max_new_tokens=12,
        block_size=4,
        draft_policy="coupled",
    )
    record = last_json(capsys.readouterr().out)
    assert record["acceptance_lengths"] == expected.acceptance_lengths[0]
    assert record["token_ids"] == expected.token_ids[0]


def test_json_has_no_nan(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """No cycle, no tau."""
    arguments = [f"--target={folders['text']}", f"--drafter={folders['drafter']}", "--prompt=ab"]
    assert run(*arguments, "--max_new_tokens=1", "--json", "--compare_autoregressive") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    record = json.loads(line, parse_constant=refuse_constant)
    assert record["mean_acceptance_length"] is None
    assert record["acceptance_lengths"] == []
    assert run(*arguments, "--max_new_tokens=0", "--compare_autoregressive") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target=nowhere"], "error: 'nowhere' is neither a folder"),
        (["--target={ids}"], "error: prompt: target '{ids}' has no tokenizer; give token ids"),
        (["--target={text}", "--system=x"], "but the target has no chat template"),
        (["--target={chat}", "--system=x", "--raw"], "but --raw is given"),
        (["--target={chat}", "--raw", "--enable_thinking"], "error: enable_thinking: True"),
        (["--target={text}", "--temperature=-1"], "error: temperature: -1.0"),
        (["--target={text}", "--top_p=0"], "error: top_p: 0.0"),
        (["--target={text}", "--max_new_tokens=-2"], "error: max_new_tokens: -2"),
        (["--target={text}", "--block_size=4"], "error: block_size: 4 needs a drafter"),
        (["--target={text}", "--compare_autoregressive"], "a drafter is needed"),
        (["--target={text}", "--drafter={text}"], "error: "),
    ],
)
def test_errors_are_one_line(
    folders: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run("--prompt=hi", *(a.format(**folders) for a in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message.format(**folders) in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


def test_stray_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["main", "target=x"]) == 2
    assert "['target=x']" in capsys.readouterr().err


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infer.main", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_the_process(folders: dict[str, str]) -> None:
    done = process(f"--target={folders['text']}", "--prompt=ab", "--max_new_tokens=4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(last_json(done.stdout)["token_ids"]) <= 4
    failed = process("--target=nowhere", "--prompt=x")
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith("error: 'nowhere'")
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_the_process_on_a_real_model(smollm2_gguf: Path) -> None:
    done = process(
        f"--target={smollm2_gguf}",
        "--prompt=What is the capital of France? Answer in one word.",
        "--max_new_tokens=24",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    record = last_json(done.stdout)
    assert "Paris" in record["text"]
    assert done.stdout.startswith(record["text"])
    assert record["finish_reason"] == "stop"
    assert "<|im_end|>" not in record["text"]
