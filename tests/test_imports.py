"""The import rules of the project, held by a scan of the syntax trees: nothing is imported here.

    scripts -> train, infer -> dflash_jax      configs -> ml_collections, configs.common

Plain-array modules import no Flax, not even through a sibling; torch is for tests and benchmarks
only, and `flax.nnx` for nobody.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450

# Top-level package -> the packages of ours that it may import. Configs are narrower, see below.
FIRST_PARTY = {
    "dflash_jax": {"dflash_jax"},
    "train": {"train", "dflash_jax"},
    "infer": {"infer", "dflash_jax"},
    "configs": {"configs"},
    "scripts": {"scripts", "train", "infer", "dflash_jax", "configs"},
    "tests": {"tests", "scripts", "train", "infer", "dflash_jax", "configs"},
}
PLAIN_ARRAY = ("rope", "masks", "attention", "block_attention", "sampling", "verify", "kernels")


def sources() -> dict[str, str]:
    """Path relative to the root -> text, of every Python file of ours."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for package in FIRST_PARTY
        for file in sorted((ROOT / package).rglob("*.py"))
    }


def trees(files: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(text, path) for path, text in files.items()}


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, lazy ones included; relative names are resolved.

    `from a import b` yields `a.b`, whether b is a module or an object: the prefix is what counts.
    """
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def plain_array(path: str) -> bool:
    parts = path.removesuffix(".py").split("/")
    return parts[0] == "dflash_jax" and len(parts) > 1 and parts[1] in PLAIN_ARRAY


def imports_flax(path: str, names: dict[str, set[str]], seen: set[str]) -> bool:
    """Whether a file of dflash_jax imports Flax itself or through a sibling module."""
    seen.add(path)
    if any(is_within(name, "flax") for name in names[path]):
        return True
    for name in names[path]:
        parts = name.split(".")
        # The longest prefix that is a file; the package's own __init__, which has all, is left out.
        for end in range(len(parts), 1, -1):
            stem = "/".join(parts[:end])
            sibling = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in names), None)
            if sibling:
                if sibling not in seen and imports_flax(sibling, names, seen):
                    return True
                break
    return False


def swallows(handler: ast.ExceptHandler) -> bool:
    """A bare `except:`, or one that does nothing."""
    idle = all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in handler.body
    )
    return handler.type is None or idle


def violations(files: dict[str, str]) -> list[str]:
    """Every breach of the rules, as `path:line: what`."""
    parsed = trees(files)
    names = {path: {name for _, name in imports(path, tree)} for path, tree in parsed.items()}
    found = []
    for path, tree in parsed.items():
        package = path.split("/")[0]
        lines = files[path].count("\n")
        if lines >= MAX_LINES:
            found.append(f"{path}:{lines}: {lines} lines, the limit is {MAX_LINES}")
        for line, name in imports(path, tree):
            top = name.split(".")[0]
            if package == "configs":
                allowed = top == "ml_collections" or is_within(name, "configs.common")
            else:
                allowed = top not in FIRST_PARTY or top in FIRST_PARTY[package]
            if not allowed:
                found.append(f"{path}:{line}: {package} must not import {name}")
            if top == "torch" and package != "tests" and not path.startswith("scripts/bench_"):
                found.append(f"{path}:{line}: torch is for tests and benchmarks only")
            if is_within(name, "flax.nnx"):
                found.append(f"{path}:{line}: flax.nnx does not import with every supported jax")
            if package == "dflash_jax" and is_within(name, "absl.flags"):
                found.append(f"{path}:{line}: the library has no flags")
        if plain_array(path) and imports_flax(path, names, set()):
            found.append(f"{path}:1: a plain-array module must not reach Flax")
        found += [
            f"{path}:{node.lineno}: an exception is swallowed"
            for node in ast.walk(tree)
            if isinstance(node, ast.ExceptHandler) and swallows(node)
        ]
    return found


def test_rules_hold() -> None:
    files = sources()
    assert "tests/test_imports.py" in files
    assert any(path.startswith("dflash_jax/") for path in files)
    assert not violations(files), "\n" + "\n".join(violations(files))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("dflash_jax/a.py", "import train.loop", "dflash_jax must not import train.loop"),
        (
            "dflash_jax/a.py",
            "def f():\n    from infer import x",
            "dflash_jax must not import infer.x",
        ),
        ("train/a.py", "from infer.generate import generate", "train must not import infer"),
        ("infer/a.py", "from train import loss", "infer must not import train.loss"),
        ("train/a.py", "from scripts import plots", "train must not import scripts.plots"),
        ("configs/a.py", "import dflash_jax", "configs must not import dflash_jax"),
        ("configs/a.py", "import jax", "configs must not import jax"),
        ("configs/a.py", "from configs.other import x", "configs must not import configs.other.x"),
        ("scripts/a.py", "import torch", "torch is for tests and benchmarks only"),
        ("dflash_jax/a.py", "def f():\n    from torch import nn", "torch is for tests"),
        ("tests/a.py", "from flax import nnx", "flax.nnx"),
        ("dflash_jax/a.py", "import flax.nnx as nnx", "flax.nnx"),
        ("dflash_jax/a.py", "from absl import flags", "no flags"),
        ("dflash_jax/rope.py", "import flax.linen as nn", "must not reach Flax"),
        ("dflash_jax/kernels/rope/api.py", "from flax import linen", "must not reach Flax"),
        ("infer/a.py", "try:\n    f()\nexcept ValueError:\n    pass", "swallowed"),
        ("infer/a.py", "try:\n    f()\nexcept ValueError:\n    ...", "swallowed"),
        ("infer/a.py", "try:\n    f()\nexcept:\n    g()", "swallowed"),
        ("tests/a.py", "x = 1\n" * MAX_LINES, "the limit is 450"),
    ],
)
def test_a_breach_is_found(path: str, text: str, message: str) -> None:
    found = violations({path: text})
    assert len(found) == 1
    assert message in found[0]
    assert found[0].startswith(path)


@pytest.mark.parametrize("form", ["from .layers import Norm", "from dflash_jax.layers import Norm"])
def test_flax_is_found_through_a_sibling(form: str) -> None:
    layers = {"dflash_jax/layers.py": "import flax.linen as nn"}
    assert violations({"dflash_jax/verify.py": form, **layers})
    assert not violations({"dflash_jax/target.py": form, **layers})


def test_what_is_allowed_passes() -> None:
    allowed = {
        "dflash_jax/target.py": "import jax\nimport flax.linen as nn\nfrom . import layers",
        "dflash_jax/layers.py": "import flax.linen as nn",
        "train/loop.py": "import dflash_jax as dj\nfrom . import step\nfrom absl import logging",
        "infer/main.py": "from absl import flags\nfrom infer.generate import generate",
        "scripts/a.py": "from train import loop\nfrom infer import generate\nimport dflash_jax",
        "configs/run.py": "from configs import common\nfrom configs.common import base",
        "configs/common.py": "from ml_collections import config_dict",
        "tests/a.py": "import torch\ntry:\n    f()\nexcept ValueError:\n    g()",
    }
    assert not violations(allowed)
