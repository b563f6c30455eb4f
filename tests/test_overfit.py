"""What training can and cannot learn: four samples by heart, random tokens not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.generation import generate_ids
from tests.test_train_loop import quiet, small
from train import setup
from train.checkpoint import Checkpoints
from train.loop import train


@pytest.fixture(scope="module")
def models() -> setup.Models:
    settings = small()
    return setup.build_models(settings, setup.build_mesh(settings))


def write(path: Path, target_name: str, prompts, responses) -> Path:
    rows = [
        {
            "id": str(i),
            "prompt_ids": prompt,
            "response_ids": response,
            "finish_reason": "length",
            "temperature": 0.0,
            "seed": 0,
            "messages": [],
            "target": target_name,
        }
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(workdir: Path, rows: Path, models: setup.Models, **changes):
    settings = small(
        synthetic__rows=0,
        data__train=(str(rows),),
        data__regenerated_by=models.target.name,
        train__checkpoint_every=1000,
        **changes,
    )
    return train(settings, workdir, quiet())


def test_a_drafter_overfitted_on_4_samples_accepts_almost_whole_blocks(
    models: setup.Models, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 64, (4, 8)).tolist()
    answers = generate_ids(models.target, None, prompts, max_new_tokens=12).token_ids
    rows = write(tmp_path / "rows.jsonl", models.target.name, prompts, answers)
    run(
        tmp_path / "run",
        rows,
        models,
        data__held_out_fraction=0.0,
        data__batch_size=4,
        train__steps=200,
        train__num_anchors=10,
        train__eval_every=0,
    )
    with Checkpoints(tmp_path / "run", keep=None) as checkpoints:
        drafter = checkpoints.restore_drafter()
    out = generate_ids(models.target, drafter, prompts, max_new_tokens=12)
    assert out.token_ids == answers
    assert out.mean_acceptance_length > 0.9 * drafter.config.block_size


def test_random_tokens_stay_at_chance(models: setup.Models, tmp_path: Path) -> None:
    """Nothing predicts a uniform token; a leak of the labels would."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(2, 64, (600, 8)).tolist()
    responses = rng.integers(2, 64, (600, 12)).tolist()
    rows = write(tmp_path / "rows.jsonl", models.target.name, prompts, responses)
    summary = run(
        tmp_path / "run",
        rows,
        models,
        data__held_out_fraction=0.2,
        data__batch_size=16,
        train__steps=150,
        train__eval_every=150,
        eval__num_rows=96,
    )
    evaluation = summary.evaluation
    assert evaluation is not None
    chance, slots = 1 / 62, evaluation["supervised"]
    deviation = (chance * (1 - chance) / slots) ** 0.5
    assert abs(evaluation["accuracy"] - chance) < 5 * deviation
