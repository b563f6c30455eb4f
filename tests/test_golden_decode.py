"""Forward passes and both decode loops against tensors of the PyTorch reference (golden/README)."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.decode import BoundTarget
from dflash_jax.drafter import Drafter, block_embeddings, draft_logits
from dflash_jax.generation import GenerationOutput, generate_ids
from dflash_jax.layers import apply
from dflash_jax.loading import load_drafter, load_target
from dflash_jax.target import Target, target_forward

pytestmark = pytest.mark.golden

ROOT = Path(__file__).resolve().parent / "data" / "golden"
CASES = ("qwen3", "llama", "qwen3_moe")
TOLERANCE = 1e-4  # max abs error in float32, golden/README.md
NEW_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden folder: models, tensors, and the prompts padded into one batch."""

    target: Target
    drafter: Drafter
    vectors: dict[str, np.ndarray]
    sequences: list[list[int]]  # prompt and greedy continuation
    prompts: list[list[int]]

    def rows(self, key: str) -> list[np.ndarray]:
        """`{j}.key` of every prompt, without the batch axis."""
        return [self.vectors[f"{j}.{key}"][0] for j in range(len(self.prompts))]

    @property
    def tokens_BT(self) -> np.ndarray:
        """Greedy sequences, padded on the right with id 0: causality keeps pads out of sight."""
        out = np.zeros((len(self.sequences), max(map(len, self.sequences))), np.int32)
        for row, sequence in zip(out, self.sequences, strict=True):
            row[: len(sequence)] = sequence
        return out

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        logits, features = target_forward(
            self.target, self.tokens_BT, self.drafter.config.target_layer_ids
        )
        return np.asarray(logits), np.asarray(features)


@cache
def load(name: str, target_of: str | None = None) -> Case:
    target = load_target(ROOT / (target_of or name) / "target")
    drafter = load_drafter(ROOT / name / "drafter", target)
    vectors = load_file(ROOT / name / "vectors.safetensors")
    source = vectors if target_of is None else load(target_of).vectors
    count = len({key.split(".")[0] for key in vectors})
    return Case(
        target,
        drafter,
        vectors,
        sequences=[source[f"{j}.greedy_ids"][0].tolist() for j in range(count)],
        prompts=[source[f"{j}.input_ids"][0].tolist() for j in range(count)],
    )


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def cut_lengths(lengths: list[int], total: int) -> list[int]:
    """Acceptance lengths of the reference, cut where `total` committed tokens are reached."""
    ends = [min(end, total) for end in itertools.accumulate(lengths)]
    return [b - a for a, b in itertools.pairwise([0, *ends]) if b > a]


def test_cut_lengths() -> None:
    assert cut_lengths([1, 3, 8, 8], 10) == [1, 3, 6]
    assert cut_lengths([1, 3, 6, 2], 10) == [1, 3, 6]


@pytest.mark.parametrize("case", CASES)
def test_target_logits_and_features(case: str) -> None:
    golden = load(case)
    logits, features = golden.forward()
    for j, (row_logits, row_features) in enumerate(
        zip(golden.rows("target_logits"), golden.rows("context_features"), strict=True)
    ):
        length = len(golden.prompts[j])
        close(logits[j, :length], row_logits)
        close(features[j, :length], row_features)


@pytest.mark.parametrize("case", CASES)
def test_one_prompt_unpadded(case: str) -> None:
    golden = load(case)
    j = min(range(len(golden.prompts)), key=lambda j: len(golden.prompts[j]))
    logits, features = target_forward(
        golden.target, np.array([golden.prompts[j]]), golden.drafter.config.target_layer_ids
    )
    close(np.asarray(logits)[0], golden.rows("target_logits")[j])
    close(np.asarray(features)[0], golden.rows("context_features")[j])


@partial(jax.jit, static_argnums=(0, 1, 2))
def draft_hidden(bound_model, model, block, target_params, params, features, anchors, positions):
    bound = BoundTarget(bound_model, target_params)
    embeddings = block_embeddings(bound.embed, anchors[:, None], block, model.config.mask_token_id)
    return apply(model, params, features, embeddings, positions[:, None])[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_block1_hidden_after_the_final_norm(case: str) -> None:
    golden = load(case)
    target, drafter = golden.target, golden.drafter
    _, features = golden.forward()
    hidden = draft_hidden(
        target.model,
        drafter.model,
        drafter.config.block_size,
        target.params,
        drafter.params,
        jnp.asarray(features),
        jnp.array([row[0] for row in golden.rows("block1_ids")]),
        jnp.array([len(prompt) for prompt in golden.prompts]),
    )
    for ours, theirs in zip(np.asarray(hidden), golden.rows("block1_draft_hidden"), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("block", ["block1", "block2"])
@pytest.mark.parametrize(
    ("case", "target_of"), [*((case, None) for case in CASES), ("qwen3_sliding", "qwen3")]
)
def test_draft_logits_of_all_slots(case: str, target_of: str | None, block: str) -> None:
    golden = load(case, target_of)
    ids = golden.rows(f"{block}_ids")
    positions = [len(prompt) for prompt in golden.prompts]
    if block == "block2":
        positions = [int(golden.vectors[f"{j}.block2_anchor_position"][0]) for j in range(len(ids))]
    anchors = [row[at] for row, at in zip(golden.sequences, positions, strict=True)]
    config = golden.drafter.config
    assert [row.tolist() for row in ids] == [
        [anchor, *[config.mask_token_id] * (config.block_size - 1)] for anchor in anchors
    ]
    _, features = golden.forward()
    # What lies at or beyond the anchor must be ignored: garbage there changes nothing.
    for row, at in zip(features := features.copy(), positions, strict=True):
        row[at:] = 1e3
    logits = draft_logits(
        golden.target, golden.drafter, features, np.array(anchors), np.array(positions)
    )
    for ours, theirs in zip(np.asarray(logits), golden.rows(f"{block}_draft_logits"), strict=True):
        close(ours, theirs)


def test_sliding_and_full_drafts_differ() -> None:
    """The sliding case is a test only where the window matters."""
    full, sliding = load("qwen3"), load("qwen3_sliding", "qwen3")
    distances = [
        np.abs(a - b).max()
        for a, b in zip(
            full.rows("block1_draft_logits"), sliding.rows("block1_draft_logits"), strict=True
        )
    ]
    assert min(distances) > 100 * TOLERANCE


def generate(golden: Case, drafter: Drafter | None, rows: list[int], **options) -> GenerationOutput:
    return generate_ids(
        golden.target,
        drafter,
        [golden.prompts[j] for j in rows],
        max_new_tokens=NEW_TOKENS,
        stop_token_ids=(),
        num_slots=256,  # one cache size, one compilation
        **options,
    )


def check(golden: Case, out: GenerationOutput, rows: list[int]) -> None:
    """Plain results: ids, lengths and reasons."""
    for ids, j in zip(out.token_ids, rows, strict=True):
        length = len(golden.prompts[j])
        assert ids == golden.rows("greedy_ids")[j][length:].tolist(), j
    assert out.finish_reasons == ["length"] * len(rows)
    assert [1 + sum(row) for row in out.acceptance_lengths] == [NEW_TOKENS] * len(rows)


def check_dflash(golden: Case, out: GenerationOutput, rows: list[int]) -> None:
    check(golden, out, rows)
    for row, (ids, j) in enumerate(zip(out.token_ids, rows, strict=True)):
        assert ids == golden.rows("dflash_ids")[j][len(golden.prompts[j]) :].tolist(), j
        theirs = golden.vectors[f"{j}.acceptance_lengths"].tolist()
        assert out.acceptance_lengths[row] == cut_lengths(theirs, NEW_TOKENS - 1), j


@pytest.mark.parametrize("case", CASES)
def test_greedy_ids(case: str) -> None:
    golden = load(case)
    everyone = list(range(len(golden.prompts)))
    check(golden, generate(golden, None, everyone), everyone)
    for j in everyone if case == "qwen3" else []:  # one case: compilations cost seconds
        check(golden, generate(golden, None, [j]), [j])


@pytest.mark.parametrize("case", CASES)
def test_dflash_ids_and_acceptance_lengths(case: str) -> None:
    golden = load(case)
    everyone = list(range(len(golden.prompts)))
    check_dflash(golden, generate(golden, golden.drafter, everyone), everyone)
    for j in everyone if case != "llama" else []:
        check_dflash(golden, generate(golden, golden.drafter, [j]), [j])


def test_smaller_blocks_give_the_same_ids() -> None:
    golden = load("qwen3")
    everyone = list(range(len(golden.prompts)))
    out = generate(golden, golden.drafter, everyone, block_size=5)
    check(golden, out, everyone)
    assert max(max(row) for row in out.acceptance_lengths) == 5
