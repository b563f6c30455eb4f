"""Which attention an uncached pass of the target uses, and that cuDNN's is asked the right thing.

cuDNN itself runs on GPUs only: `scripts/check_kernels.py` compares its numbers.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from dflash_jax import attention
from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.layers import apply
from dflash_jax.target import Target, TargetModel, init_target, resolve_attention, target_forward
from tests.gpu_rigs import Device, lowering_for_cuda
from train import setup
from train.settings import Settings

GPU = Device("gpu", "PJRT C API\ncuda 13000", "9.0")


@cache
def target(**changes: Any) -> Target:
    """Two query heads a key/value head, so that their order shows."""
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return init_target(TargetConfig.tiny(**(options | changes)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Makes the same call of `jax.nn` without cuDNN; the list has the arguments of each."""
    seen: list[dict[str, Any]] = []
    plain = jax.nn.dot_product_attention

    def record(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        seen.append(options)
        return plain(q, k, v, is_causal=options["is_causal"], implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *_: None)
    return seen


@pytest.mark.parametrize("windows", [0, 1])
def test_equals_dense(windows: int, calls: list[dict[str, Any]]) -> None:
    """Heads, layout and mask; a layer with a sliding window stays dense."""
    changes: dict[str, Any] = {}
    if windows:
        kinds = ("sliding_attention", "full_attention")
        changes = {"layer_types": kinds, "sliding_window": 3}
    tested = target(**changes)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, tested.config.vocab_size)
    want, got = (
        jax.jit(partial(apply, tested.model, layer_ids=(0, 1), attention=name))(
            tested.params, tokens
        )
        for name in ("dense", "cudnn")
    )
    np.testing.assert_allclose(got[0], want[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5, rtol=1e-5)
    assert calls == [{"is_causal": True, "implementation": "cudnn"}] * (2 - windows)


def test_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *_: None)
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)
    q = jax.ShapeDtypeStruct((2, 64, 3, 3, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 3, 64, 64), jnp.bfloat16)
    with lowering_for_cuda():
        traced = jax.jit(attention.attend_causal_cudnn).trace(q, kv, kv)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
    assert "CAUSAL" in text


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (GPU, "bfloat16", 64, None),
        (GPU, "bfloat16", 128, None),
        (GPU, "float32", 64, "the dtype is float32"),
        (GPU, "bfloat16", 68, "it is 68"),
        (GPU, "bfloat16", 136, "it is 136"),
        (Device("cpu", "", ""), "bfloat16", 64, "the device is cpu"),
        (Device("gpu", "rocm 60300", "gfx942"), "bfloat16", 64, "needs an NVIDIA GPU"),
    ],
)
def test_auto_picks_what_runs(device: Any, dtype: str, head_dim: int, reason: str | None) -> None:
    config = TargetConfig.tiny(head_dim=head_dim)
    model = TargetModel(config, jnp.dtype(dtype))
    assert resolve_attention("auto", model, [device]) == ("dense" if reason else "cudnn")
    assert resolve_attention("dense", model, [device]) == "dense"
    if reason is None:
        assert resolve_attention("cudnn", model, [device]) == "cudnn"
    else:
        with pytest.raises(ValueError, match=f"'cudnn' needs .*{reason}|'cudnn' {reason}"):
            resolve_attention("cudnn", model, [device])
    with pytest.raises(ValueError, match="'flash' is not one of"):
        resolve_attention("flash", model, [device])


def test_asked_for_by_name_it_fails_where_it_cannot_run() -> None:
    tested, tokens = target(), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="'cudnn' needs an NVIDIA GPU"):
        target_forward(tested, tokens, attention="cudnn")
    with pytest.raises(ValueError, match="'cudnn' needs an NVIDIA GPU"):
        apply(tested.model, tested.params, tokens, attention="cudnn")
    with pytest.raises(ValueError, match="attention: 'flash' is not one of"):
        apply(tested.model, tested.params, tokens, attention="flash")
    np.testing.assert_array_equal(
        target_forward(tested, tokens, attention="auto")[0], target_forward(tested, tokens)[0]
    )


def test_no_cache_and_no_mask_of_its_own(calls: list[dict[str, Any]]) -> None:
    tested, tokens = target(), jnp.zeros((1, 4), jnp.int32)
    cache = tested.model.init_cache(1, 8)
    own = {"mask_BTS": jnp.ones((1, 4, 4), bool)}, {"positions_BT": jnp.arange(4)[None]}
    for arguments, options in (((cache,), {}), ((), own[0]), ((), own[1])):
        with pytest.raises(ValueError, match="'cudnn' takes no cache, positions_BT or mask_BTS"):
            apply(tested.model, tested.params, tokens, *arguments, attention="cudnn", **options)
    assert not calls


@pytest.mark.parametrize(
    ("field", "value"), [("attention", "pallas"), ("target_attention", "cudnn")]
)
def test_a_run_names_the_setting(field: str, value: str) -> None:
    """Asked for by name on a CPU it is an error; "auto" falls to what runs."""
    config = tiny.get_config()
    config.train.update({"attention": "auto", "target_attention": "auto"})
    settings = Settings.from_config(config, "configs/x.py")
    models = setup.build_models(settings, setup.build_mesh(settings))
    objective = setup.build_objective(settings, models)
    assert (objective.attention, objective.target_attention) == ("chunked", "dense")
    config.train[field] = value
    settings = Settings.from_config(config, "configs/x.py")
    with pytest.raises(
        ConfigError, match=f"configs/x.py: train.{field}: '{value}' needs an NVIDIA"
    ):
        setup.build_objective(settings, models)
