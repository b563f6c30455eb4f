"""The benchmark's record of where it ran, and its tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

_PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax", "numpy", "transformers")


def environment() -> dict[str, Any]:
    """Date, versions and hardware, for the record."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "hardware": {
            "backend": jax.default_backend(),
            "device": device.device_kind,
            "devices": jax.device_count(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "matmul_precision": jax.config.values["jax_default_matmul_precision"] or "default",
        },
    }


def print_results(results: dict[str, Any]) -> None:
    """Tables for people; the JSON has everything."""
    console = Console(highlight=False, soft_wrap=True, width=120)
    config, hardware = results["config"], results["hardware"]
    console.print(
        f"{config['target']} + {config['drafter'] or 'no drafter'}, {config['dtype']}, "
        f"{hardware['device']} ({hardware['backend']}), batch {config['batch_size']}, "
        f"{config['context']} cache slots"
    )
    if results["synthetic_acceptance"] is not None:
        console.print(
            f"SYNTHETIC acceptance, forced to a mean of {results['synthetic_acceptance']}: costs "
            "are real, the text is not the target's",
            style="bold red",
        )
    ways = [name for name in ("plain", "speculative") if name in results]
    table = Table(box=None, padding=(0, 2))
    table.add_column("", no_wrap=True)
    for way in ways:
        table.add_column(way, justify="right", no_wrap=True)
    for label, field in (
        ("ms a step / cycle", "step_ms"),
        ("prefill ms a batch", "prefill_ms"),
        ("decode tokens/s", "decode_tokens_per_second"),
        ("tokens/s, prefill included", "tokens_per_second"),
    ):
        table.add_row(label, *(_spread_text(results[way][field]) for way in ways))
    table.add_row("tau", *(_number(results[way]["mean_acceptance_length"]) for way in ways))
    table.add_row("tokens", *(str(results[way]["tokens"]) for way in ways))
    table.add_row("steps / cycles", *(str(results[way]["steps"]) for way in ways))
    table.add_row("floor ms (weights / copy)", *(_number(results[way]["floor_ms"]) for way in ways))
    table.add_row("times the floor", *(_number(results[way]["times_floor"]) for way in ways))
    console.print(table)
    if "comparison" in results:
        compared = results["comparison"]
        console.print(
            f"cycle cost {compared['cycle_cost_in_steps']:.2f} plain steps = break-even acceptance "
            f"length; speedup {compared['decode_speedup']:.2f}x decoding, "
            f"{compared['speedup']:.2f}x with prefill"
        )
    if "identical" in results:
        same = results["identical"]
        text = f"identical rows: {same['rows'] - same['different']} of {same['rows']}"
        if same.get("margins"):
            text += f"; largest log-probability margin where rows part: {max(same['margins']):.3g}"
        console.print(text)
    device = results["device"]
    console.print(
        f"copy {device['copy_bytes_per_second'] / 1e9:.1f} GB/s, matrix products "
        f"{device['matmul_flops_per_second'] / 1e12:.2f} TFLOP/s"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _spread_text(spread: dict[str, float]) -> str:
    return f"{spread['median']:.4g} ({spread['min']:.4g} .. {spread['max']:.4g})"
