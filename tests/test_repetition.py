"""Loops: what they are, where they start, and what training and evaluation make of them."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data import load_samples, make_loader
from train.evaluate import teacher_forced
from train.loss import LossSums
from train.repetition import is_looping, length_without_loop
from train.store import StorePart


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([5, 6, 7] * 3, 3),
        ([1, 2, 3, 4, *([5, 6, 7] * 3)], 7),
        ([1, 7, *([5, 6, 7] * 4), 5], 4),  # the loop is 7 5 6, found from its first 7 on
        ([*([5, 6, 7] * 3), 8], 10),
        ([5, 6, 7] * 2, 6),
        ([*range(10), 4, 4, 4], 11),
        (list(range(32)) * 3, 32),
        (list(range(33)) * 3, 99),
        ([8, *(list(range(10)) * 40)], 11),  # much longer than the window
        ([4, 4], 2),
        ([], 0),
    ],
)
def test_where_a_loop_is_cut(tokens: list[int], kept: int) -> None:
    assert is_looping(tokens) == (kept < len(tokens))
    assert length_without_loop(tokens) == kept
    assert length_without_loop(np.array(tokens, np.int32)) == kept
    assert not is_looping(tokens[:kept])


def answers(path: Path) -> Path:
    """Three rows, of which the second loops from its third token on."""
    responses = {"a": [1, 2, 3, 4], "b": [8, 9, *([5, 6] * 20)], "c": [4, 3, 2, 1]}
    rows = [
        {"id": id, "prompt_ids": [3, 3, ord(id)], "response_ids": ids, "finish_reason": "length"}
        for id, ids in responses.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("loops", "lengths", "counts"),
    [
        ("keep", [7, 45, 7], (1, 0)),
        ("cut", [7, 7, 7], (1, 38)),
        ("drop", [7, 7], (1, 0)),
    ],
)
def test_loops_in_training_rows(
    tmp_path: Path, loops: str, lengths: list[int], counts: tuple[int, int]
) -> None:
    store, report = load_samples(
        answers(tmp_path / "rows.jsonl"), None, max_length=64, vocab_size=128, loops=loops
    )
    assert store.lengths.tolist() == lengths
    assert (report.looping, report.loop_tokens) == counts
    assert report.rows == report.kept + report.unusable.total() == 3
    assert "responses that end in a loop: 1" in str(report)
    if loops == "cut":
        assert store[1]["tokens"].tolist() == [3, 3, ord("b"), 8, 9, 5, 6]  # nothing follows
        assert "38 tokens of them cut off" in str(report)
    if loops == "drop":
        assert report.unusable == {"the response ends in a loop": 1}


def test_teacher_forced_numbers_tell_looping_rows_apart(tmp_path: Path) -> None:
    store, _ = load_samples(answers(tmp_path / "rows.jsonl"), None, max_length=64, vocab_size=128)
    assert store.looping.tolist() == [False, True, False]

    def eval_step(params, target_params, batch, key) -> LossSums:
        rows = (batch["sample_id_B"] >= 0).astype(np.float32)
        looping = (batch["sample_id_B"] == 1).astype(np.float32)  # accepted well
        return LossSums(
            numerator=jnp.sum(batch["sample_id_B"] * rows),
            denominator=jnp.sum(rows),
            correct_G=jnp.zeros(4),
            supervised_G=jnp.ones(4),
            accepted=jnp.sum(2 * rows + 6 * looping),
            blocks=jnp.sum(rows),
        )

    def batches(looping: bool) -> list:
        part = StorePart(store, np.flatnonzero(store.looping == looping))
        return list(
            make_loader(
                part,
                batch_size=2,
                seq_length=64,
                seed=0,
                epochs=1,
                shuffle=False,
                drop_remainder=False,
            )
        )

    assert [b["sample_id_B"].tolist() for b in batches(True)] == [[1, -1]]
    row = teacher_forced(eval_step, None, None, batches(False), batches(True))
    assert (row["acceptance_other"], row["acceptance_looping"]) == (2, 8)
    assert row["acceptance"] == 4
    assert row["loss"] == 1
    assert row["blocks"] == 3
    alone = teacher_forced(eval_step, None, None, batches(False))
    assert alone["acceptance"] == alone["acceptance_other"] == 2
    assert math.isnan(alone["acceptance_looping"])
    with pytest.raises(ValueError, match="no evaluation rows"):
        teacher_forced(eval_step, None, None, [], jax.tree.leaves([]))
