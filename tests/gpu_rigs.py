"""What tests about GPUs need on a machine without one."""

import contextlib
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lowering_for_cuda() -> Any:
    """Tells jax 0.11 and later which GPU it lowers for on a machine without one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


class Device:
    """A device as the code that chooses an attention sees it."""

    def __init__(self, platform: str, version: str, capability: str) -> None:
        self.platform, self.compute_capability = platform, capability
        self.client = type("Client", (), {"platform_version": version})
