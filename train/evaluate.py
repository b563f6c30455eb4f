"""How good a drafter is: accuracy by slot, simulated acceptance, and real decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.drafter import Drafter
from dflash_jax.generation import GenerationOutput, generate_ids
from dflash_jax.target import Target
from train.loss import LossSums, mean_loss
from train.repetition import is_looping


@dataclasses.dataclass(frozen=True)
class RealDecode:
    """Speculative decoding of held-out prompts.

    Attributes:
      acceptance: tau over all rows (committed tokens / cycles, cut cycles excluded).
      acceptance_looping, acceptance_other: tau of the rows whose text ends in a loop, and of the
        rest. A loop is easy to draft, so a target that loops flatters its drafter. NaN: no rows.
      looping, prompts: rows that end in a loop, and all rows.
    """

    acceptance: float
    acceptance_looping: float
    acceptance_other: float
    looping: int
    prompts: int


def rates(sums: LossSums) -> dict[str, Any]:
    """What sums on the host say of the drafter, NaN where nothing was supervised:

    accuracy (correct / supervised slots), accuracy_by_slot (entry k - 1 for slot k), acceptance
    (simulated tau: leading correct slots + 1, the mean over blocks), blocks and supervised slots.
    """
    correct, supervised = (np.asarray(x, float)[1:] for x in (sums.correct_G, sums.supervised_G))
    return {
        "accuracy": _ratio(correct.sum(), supervised.sum()),
        "accuracy_by_slot": [_ratio(c, s) for c, s in zip(correct, supervised, strict=True)],
        "acceptance": _ratio(float(sums.accepted), float(sums.blocks)),
        "blocks": int(sums.blocks),
        "supervised": int(supervised.sum()),
    }


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def teacher_forced(
    eval_step: Callable[..., LossSums],
    params: Any,
    target_params: Any,
    other: Iterable[Any],
    looping: Iterable[Any] = (),
) -> dict[str, Any]:
    """Loss and `rates` over placed batches; the anchors are the same at every call.

    Args:
      other, looping: batches of rows whose response does not end in a loop, and of those that
        do. `acceptance_other` and `acceptance_looping` are of each, the rest is of both.
    """
    parts = {
        name: _sum_batches(eval_step, params, target_params, batches)
        for name, batches in (("other", other), ("looping", looping))
    }
    present = [sums for sums in parts.values() if sums is not None]
    if not present:
        raise ValueError("no evaluation rows")
    total = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *present)
    row = {"loss": float(mean_loss(total)), **rates(total)}
    for name, sums in parts.items():
        row[f"acceptance_{name}"] = math.nan if sums is None else rates(sums)["acceptance"]
    return row


def _sum_batches(
    eval_step: Callable[..., LossSums], params: Any, target_params: Any, batches: Iterable[Any]
) -> LossSums | None:
    key = jax.random.key_data(jax.random.key(0))
    total: LossSums | None = None
    for batch in batches:
        sums = eval_step(params, target_params, batch, key)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return None if total is None else jax.device_get(total)


def decode_prompts(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> RealDecode:
    """Greedy speculative decoding of all prompts in one batch."""
    out = generate_ids(target, drafter, prompts, max_new_tokens=max_new_tokens)
    looping = [is_looping(row) for row in out.token_ids]
    return RealDecode(
        acceptance=out.mean_acceptance_length,
        acceptance_looping=_mean_acceptance(out, looping),
        acceptance_other=_mean_acceptance(out, [not loop for loop in looping]),
        looping=sum(looping),
        prompts=len(prompts),
    )


def _mean_acceptance(out: GenerationOutput, chosen: Sequence[bool]) -> float:
    rows = [i for i, keep in enumerate(chosen) if keep]
    part = dataclasses.replace(
        out,
        acceptance_lengths=[out.acceptance_lengths[i] for i in rows],
        cut=[out.cut[i] for i in rows],
    )
    return part.mean_acceptance_length
