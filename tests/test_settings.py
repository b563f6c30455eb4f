"""Run configs become settings, or an error that names the file, the field and the values."""

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import tiny
from dflash_jax.errors import ConfigError
from train.settings import Settings

CONFIGS = sorted(
    file.stem
    for file in (Path(__file__).parent.parent / "configs").glob("*.py")
    if file.stem not in ("__init__", "common")
)


def config(**changes: Any) -> ConfigDict:
    """The tiny config with `section__field=value` replaced."""
    out = tiny.get_config().unlock()
    for name, value in changes.items():
        section, field = name.split("__")
        with out[section].ignore_type():
            out[section][field] = value
    return out


def errors(changed: ConfigDict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Settings.from_config(changed, "configs/x.py")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("configs/x.py: ") for line in lines)
    return [line.removeprefix("configs/x.py: ") for line in lines]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_documented(name: str) -> None:
    module = importlib.import_module(f"configs.{name}")
    settings = Settings.from_config(module.get_config(), f"configs/{name}.py")
    assert json.loads(json.dumps(settings.to_dict())) == settings.to_dict()
    assert hash(settings)
    doc = ast.get_docstring(ast.parse(Path(str(module.__file__)).read_text()))
    assert doc is not None
    assert f"--config=configs/{name}.py" in doc
    assert re.search(r"(Hardware:|cores).*Expected:", doc, re.DOTALL)


def test_the_recipe_is_the_published_one() -> None:
    settings = Settings.from_config(importlib.import_module("configs.qwen3_8b").get_config())
    assert settings.optimizer.learning_rate == 6e-4
    assert settings.optimizer.warmup_ratio == 0.04
    assert settings.optimizer.clip_norm == 1.0
    assert (settings.train.epochs, settings.train.num_anchors) == (6, 512)
    assert (settings.data.max_length, settings.drafter.block_size) == (3072, 16)
    assert (settings.drafter.num_layers, settings.drafter.mask_token_id) == (5, 151669)


def test_unknown_and_missing_fields() -> None:
    changed = config()
    changed.train.num_anchor = 3
    changed.evaluation = ConfigDict()
    del changed.mesh["tensor"]
    assert errors(changed) == [
        "evaluation: unknown field (known: ['target', 'drafter', 'data', 'synthetic', 'train', "
        "'optimizer', 'mesh', 'eval'])",
        "train.num_anchor: unknown field; did you mean train.num_anchors?",
        "mesh.tensor: missing",
    ]
    changed = config()
    del changed["eval"]
    with changed.ignore_type():
        changed.mesh = 3
    assert errors(changed) == ["eval: missing", "mesh: 3 is not a section"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__steps": 3.5}, "train.steps: 3.5 (float) is not int"),
        ({"train__steps": True}, "train.steps: True (bool) is not int"),
        ({"train__steps": -1}, "train.steps: -1 is not allowed (minimum 0)"),
        ({"train__loss": "dace"}, "train.loss: 'dace' is not one of"),
        ({"train__labels": "row"}, "train.labels: 'row' is not one of ['data', 'target']"),
        ({"train__soft_weight": 1.5}, "train.soft_weight: 1.5 is not allowed (maximum 1)"),
        ({"train__anchors": "all"}, "train.anchors: 'all' is not one of ['random', 'uniform']"),
        ({"drafter__init": "zero"}, "drafter.init: 'zero' is not one of ['random', 'target']"),
        ({"target__path": 7}, "target.path: 7 (int) is not str"),
        ({"data__train": "a.jsonl"}, "data.train: 'a.jsonl' (str) is not a tuple of str"),
        ({"data__train": (1,)}, "data.train: (1,) (tuple) is not a tuple of str"),
        ({"data__enable_thinking": 1}, "data.enable_thinking: 1 (int) is not bool"),
        ({"data__held_out_fraction": 1.0}, "data.held_out_fraction: 1.0 is not allowed (below 1)"),
        ({"optimizer__learning_rate": 0}, "optimizer.learning_rate: 0.0 is not allowed (above 0)"),
        ({"optimizer__name": "lion"}, "optimizer.name: 'lion' is not one of ['adamw', 'muon']"),
        ({"optimizer__schedule": "step"}, "optimizer.schedule: 'step' is not one of ['cosine',"),
        ({"optimizer__decay_shape": "x"}, "optimizer.decay_shape: 'x' is not one of ['linear',"),
        ({"optimizer__decay_ratio": 1.5}, "optimizer.decay_ratio: 1.5 is not allowed (maximum 1)"),
        (
            {"optimizer__schedule": "wsd", "optimizer__decay_ratio": 0.97},
            "optimizer.warmup_ratio 0.04 + decay_ratio 0.97 is above 1",
        ),
        ({"optimizer__b1": float("nan")}, "optimizer.b1: nan is not a finite number"),
        ({"drafter__target_layer_ids": (-1,)}, "drafter.target_layer_ids: -1 is not allowed"),
        ({"train__steps": 0, "train__epochs": 0}, "train.steps 0 and train.epochs 0: nothing"),
        ({"data__train": ["a"]}, "data.train ['a'] and synthetic.rows 1024: set one of them"),
        ({"drafter__mask_token_id": -1}, "drafter.mask_token_id: -1 needs drafter.warm_start"),
        ({"drafter__block_size": 1}, "drafter.block_size: 1 leaves nothing to predict"),
        ({"drafter__block_size": 41}, "drafter.block_size 41 is above data.max_length 40"),
        ({"mesh__fsdp": 3}, "data.batch_size 16 / train.accumulate 1 is not divisible by mesh"),
        ({"train__accumulate": 3}, "data.batch_size 16 / train.accumulate 3 is not divisible"),
        ({"synthetic__response_length": 40}, "response_length 48 is above data.max_length 40"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    found = errors(config(**change))
    assert any(message in line for line in found), found


def test_all_problems_are_listed_together() -> None:
    found = errors(config(train__steps=-1, mesh__data=0, target__seed="x"))
    assert len(found) == 3


def test_what_is_equivalent_is_accepted() -> None:
    settings = Settings.from_config(config(optimizer__clip_norm=1, drafter__target_layer_ids=[1]))
    assert settings.optimizer.clip_norm == 1.0
    assert isinstance(settings.optimizer.clip_norm, float)
    assert settings.drafter.target_layer_ids == (1,)
