"""Parity and speed of the attention kernels on this machine's GPU, and of the training step.

    python scripts/check_kernels.py [--output=FILE.json] [--parts=attention,target,step]

Parity: the kernel's output and gradients against the dense specification, as the norm of the
difference over the norm; in bfloat16 both are compared with the specification in float32, so that
"dense" says what bfloat16 costs by itself. Times are medians after a first call. A case that fails
is recorded and the others go on; the exit status is then 1. Random weights and data: nothing is
read. `--tiny` runs small cases on any backend, the kernel in plain JAX.
"""

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from configs import smollm2_135m
from dflash_jax.block_attention import context_block_attention
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import DFlashDrafter
from dflash_jax.kernels.block_attention.api import block_attention
from dflash_jax.kernels.block_attention.layout import Tiles
from dflash_jax.target import Target, init_target
from infer.bench_report import environment
from train import setup
from train.optimizer import make_optimizer, make_schedule
from train.settings import Settings
from train.state import create_state
from train.step import make_train_step

PARTS = ("attention", "target", "step")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Of {PARTS}.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls.", lower_bound=1)
_TINY = flags.DEFINE_bool("tiny", False, "Small cases, on any backend.")

ARRAYS = ("out", "dq", "dk", "dv", "dk block", "dv block")
FLOAT32_LIMIT = 1e-5
BFLOAT16_LIMIT = 1.5  # times the error of the dense path in bfloat16
Attend = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one draft layer's attention in training."""

    name: str
    batch: int
    kv_heads: int
    groups: int
    head_dim: int
    length: int
    anchors: int
    block: int
    window: int | None = None

    def part(self, batch: int, anchors: int) -> "Case":
        """Fewer rows and anchors, for float32."""
        return dataclasses.replace(self, batch=batch, anchors=anchors)

    def arrays(self, dtype: Any) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """Random inputs, ascending anchors with some invalid ones behind, and a cotangent."""
        B, K, R, H = self.batch, self.kv_heads, self.groups, self.head_dim
        A, G = self.anchors, self.block
        context, own = (B, K, self.length, H), (B, A, G, K, H)
        shapes = ((B, A, G, K * R, H), context, context, own, own)
        keys = jax.random.split(jax.random.key(0), 6)
        arrays = tuple(
            jax.random.normal(k, s, dtype) for k, s in zip(keys[:5], shapes, strict=True)
        )
        rng = np.random.default_rng(0)
        drawn = [rng.permutation(self.length - 1)[:A] for _ in range(B)]
        anchors = np.sort(np.stack(drawn), axis=1).astype(np.int32)
        anchors[:, A - A // 16 :] = 0
        return arrays, jnp.asarray(anchors), jax.random.normal(keys[5], shapes[0], dtype)


CASES = (
    Case("SmolLM2-135M", 32, 3, 3, 64, 768, 128, 16),
    Case("Qwen3-8B", 1, 8, 4, 128, 3072, 512, 16),
)
TINY_CASES = (Case("tiny", 2, 1, 3, 16, 40, 4, 4),)
TILES = (  # besides the default ones; larger ones spill registers
    Tiles(128, 64, 8, 8, 2),
    Tiles(64, 64, 4, 8, 3),
    Tiles(32, 32, 4, 4, 2),
)


def pallas(
    q_BAGNH: jax.Array, *rest: jax.Array, tiles: Tiles | None, window: int | None, causal: bool
) -> jax.Array:
    """`context_block_attention` with "pallas" and tiles of choice."""
    batch, anchors, block, heads, head_dim = q_BAGNH.shape
    kv_heads = rest[0].shape[1]
    q = (q_BAGNH * head_dim**-0.5).reshape(batch, anchors, block, kv_heads, -1, head_dim)
    out = block_attention(
        q, *rest, window=window, causal=causal, tiles=tiles, interpret=_TINY.value
    )
    return out.reshape(q_BAGNH.shape)


def implementation(name: str, tiles: Tiles | None = None) -> Attend:
    if name == "pallas":
        return partial(pallas, tiles=tiles)
    return partial(context_block_attention, implementation=name)


def compiled(attend: Attend, case: Case, gradients: bool) -> Callable[..., Any]:
    """`(arrays, anchors, cotangent) -> output` or `(output, *gradients)`, jitted."""

    def run(arrays: Any, anchors: jax.Array, cotangent: jax.Array) -> Any:
        def of(*arrays: jax.Array) -> jax.Array:
            return attend(*arrays, anchors, window=case.window, causal=case.window is not None)

        if not gradients:
            return of(*arrays)
        out, vjp = jax.vjp(of, *arrays)
        return out, *vjp(cotangent)

    return jax.jit(run)


def milliseconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Median of calls that are waited for one by one."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(_REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@jax.jit
def relative(got: Any, want: Any) -> list[jax.Array]:
    """Norm of the difference over the norm, of each array."""
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(got, want, strict=True)]
    return [jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()) for a, b in wide]


def errors(got: Any, want: Any) -> dict[str, float]:
    return dict(zip(ARRAYS, map(float, relative(got, want)), strict=True))


def check_float32(case: Case) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        inputs = case.arrays(jnp.float32)
        want, got = (
            compiled(implementation(name), case, True)(*inputs) for name in ("dense", "pallas")
        )
    found = errors(got, want)
    return {"error": found, "ok": max(found.values()) <= FLOAT32_LIMIT}


def check_bfloat16(case: Case) -> dict[str, Any]:
    inputs = case.arrays(jnp.bfloat16)
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        want = compiled(implementation("dense"), case, True)(*wide)
    of_dense, of_pallas = (
        errors(compiled(implementation(name), case, True)(*inputs), want)
        for name in ("dense", "pallas")
    )
    ok = all(of_pallas[name] <= BFLOAT16_LIMIT * of_dense[name] for name in ARRAYS)
    return {"error": of_pallas, "error of dense": of_dense, "ok": ok}


def time_attention(case: Case, name: str) -> dict[str, Any]:
    inputs, attend = case.arrays(jnp.bfloat16), implementation(name)
    return {
        "forward ms": milliseconds(compiled(attend, case, False), *inputs),
        "forward + backward ms": milliseconds(compiled(attend, case, True), *inputs),
    }


def time_tiles(case: Case, tiles: Tiles) -> dict[str, Any]:
    run = compiled(implementation("pallas", tiles), case, True)
    return {"forward + backward ms": milliseconds(run, *case.arrays(jnp.bfloat16))}


def features(target: Target, attention: str) -> Callable[..., jax.Array]:
    """The target's part of a training step: `(params, tokens) -> features`, jitted."""
    ids = tuple(range(0, target.config.num_hidden_layers, 6))

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        out = target.model.apply({"params": params}, tokens, layer_ids=ids, attention=attention)
        return out[1]

    return jax.jit(run)


def check_target(target: Target, tokens: jax.Array) -> dict[str, Any]:
    """Both attentions: times, and the features against the dense path in float32."""
    wide = dataclasses.replace(
        target, model=type(target.model)(target.config, jnp.dtype("float32"))
    )
    wide_params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
    with jax.default_matmul_precision("highest"):
        want = features(wide, "dense")(wide_params, tokens)
    row: dict[str, Any] = {}
    for name in ("dense",) if _TINY.value else ("dense", "cudnn"):
        run = features(target, name)
        found = float(relative([run(target.params, tokens)], [want])[0])
        row[f"{name} forward ms"] = milliseconds(run, target.params, tokens)
        row["error" if name == "cudnn" else "error of dense"] = {"features": found}
    row["forward ms"] = row.get("cudnn forward ms", row["dense forward ms"])
    found = row.get("error", row["error of dense"])["features"]
    return row | {"ok": found <= BFLOAT16_LIMIT * row["error of dense"]["features"]}


def time_step(
    target: Target, batch: int, length: int, attention: str, target_attention: str
) -> dict[str, Any]:
    """A whole training step: 3 draft layers, 128 anchors of 16 slots (tiny: 4 of 4)."""
    anchors, block = (4, 4) if _TINY.value else (128, 16)
    config = smollm2_135m.get_config()
    config.data.update(max_length=length, batch_size=batch)
    config.drafter.update(num_layers=3, num_taps=1 if _TINY.value else 5, block_size=block)
    config.train.update(
        steps=100,
        gamma=7.0,
        num_anchors=anchors,
        attention=attention,
        target_attention=target_attention,
    )
    settings = Settings.from_config(config)
    drafter = DrafterConfig.for_target(
        target.config,
        mask_token_id=settings.drafter.mask_token_id,
        num_layers=settings.drafter.num_layers,
        num_taps=settings.drafter.num_taps,
        block_size=block,
    )
    models = setup.Models(
        target, drafter, DFlashDrafter(drafter, target.model.dtype), None, "random"
    )
    mesh = setup.build_mesh(settings)
    optimizer = make_optimizer(settings.optimizer, settings.train.steps)
    make_params, arguments = models.initial_params(0)
    make_state, abstract = create_state(make_params, optimizer, 0, mesh, *arguments)
    step = make_train_step(
        setup.build_objective(settings, models),
        optimizer,
        make_schedule(settings.optimizer, settings.train.steps),
        settings.train.accumulate,
        mesh,
        abstract,
    )
    rng = np.random.default_rng(0)
    rows = {
        "tokens_BT": rng.integers(20, target.config.vocab_size, (batch, length), np.int32),
        "loss_mask_BT": np.ones((batch, length), bool),
        "length_B": np.full(batch, length, np.int32),
        "sample_id_B": np.arange(batch, dtype=np.int32),
    }
    placed, state = setup.place(rows, mesh), make_state()
    losses = []
    for i in range(_REPEATS.value + 1):
        if i == 1:
            start = time.perf_counter()
        state, metrics = step(state, target.params, placed)
        losses.append(metrics.loss)
        if i in (0, _REPEATS.value):
            jax.block_until_ready(losses)
    taken = (time.perf_counter() - start) / _REPEATS.value
    return {
        "step ms": 1e3 * taken,
        "first loss": float(losses[0]),
        "ok": all(np.isfinite(losses)),
    }


def attention_cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for case in TINY_CASES if _TINY.value else CASES:
        small = case.part(min(case.batch, 2), min(case.anchors, 64))
        yield f"{case.name}, float32 parity", partial(check_float32, small)
        yield f"{case.name}, bfloat16 parity", partial(check_bfloat16, case)
        for name in ("dense", "chunked", "pallas"):
            yield f"{case.name}, {name}", partial(time_attention, case, name)
        for tiles in () if _TINY.value else TILES:
            label = ", ".join(map(str, dataclasses.astuple(tiles)))
            yield f"{case.name}, pallas, tiles {label}", partial(time_tiles, case, tiles)
    if not _TINY.value:
        windowed = dataclasses.replace(CASES[0].part(4, 128), window=256)
        yield "SmolLM2-135M, window 256, bfloat16 parity", partial(check_bfloat16, windowed)


def model_cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    batch, length = (2, 24) if _TINY.value else (32, 768)
    config = TargetConfig.tiny() if _TINY.value else TargetConfig.smollm2_135m()
    target = init_target(config, dtype=jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, config.vocab_size)
    if "target" in _PARTS.value:
        yield "target forward", partial(check_target, target, tokens)
    if "step" in _PARTS.value:
        pairs = [("pallas", "cudnn"), ("dense", "dense"), ("chunked", "dense")]
        for pair in pairs[2:] if _TINY.value else pairs:
            label = f"step, drafter {pair[0]}, target {pair[1]}"
            yield label, partial(time_step, target, batch, length, *pair)


def attempt(name: str, run: Callable[[], dict[str, Any]], console: Console) -> dict[str, Any]:
    """One case; what it raises becomes its result."""
    start = time.perf_counter()
    try:
        row = {"name": name, **run()}
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        row = {"name": name, "ok": False, "raised": lines[:6]}
        console.print("\n".join(lines[:6])[:1500], style="red", markup=False)
    row["seconds"] = time.perf_counter() - start
    console.print(f"{row['seconds']:5.1f} s  {name}", markup=False)
    return row


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table("", "ok", "forward ms", "+ backward ms", "step ms", "largest error", "of dense")
    for row in rows:
        times = [row.get(k) for k in ("forward ms", "forward + backward ms", "step ms")]
        worst = [max(row[k].values()) if k in row else None for k in ("error", "error of dense")]
        out.add_row(
            row["name"],
            {True: "yes", False: "NO", None: ""}[row.get("ok")],
            *("" if t is None else f"{t:.2f}" for t in times),
            *("" if e is None else f"{e:.1e}" for e in worst),
        )
    return out


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = sorted(set(_PARTS.value) - set(PARTS))
    if unknown:
        raise app.UsageError(f"--parts: {unknown} are not in {PARTS}")
    console = Console(width=120, highlight=False)
    rows: list[dict[str, Any]] = []
    cases = attention_cases() if "attention" in _PARTS.value else iter(())
    if {"target", "step"} & set(_PARTS.value):
        cases = itertools.chain(cases, model_cases())
    for name, run in cases:
        rows.append(attempt(name, run, console))
        if _OUTPUT.value:  # after each case: a run cut short leaves what it has found
            results = {"command": sys.argv, **environment(), "cases": rows}
            Path(_OUTPUT.value).write_text(json.dumps(results, indent=1) + "\n")
    console.print(table(rows))
    sys.exit(any(row.get("ok") is False for row in rows))


if __name__ == "__main__":
    app.run(main)
