"""DFlash in JAX: block-diffusion drafters, lossless speculative decoding, training parts.

Tensors carry their shape as a suffix (`tokens_BT`, `k_BKSH`). Legend:

    B batch            T query tokens      S cache slots        G block length (slots of a draft)
    A anchors          D model width       N query heads        K key/value heads
    R query heads per key/value head       H head dim           F mlp width
    V vocabulary       L layers            C tapped layers      M = C * D, the concatenated taps
    E experts

Terms: the *target* is the frozen model whose output is reproduced; the *drafter* proposes; an
*anchor* is the last known token, which heads a block; the *bonus token* is the target's own token
after the accepted drafts; the *acceptance length* (tau) counts the tokens committed in a cycle,
the bonus token included.
"""

from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig, default_target_layer_ids
from dflash_jax.drafter import Drafter, draft_logits, init_drafter
from dflash_jax.errors import ConfigError, DFlashError, LoadError, WeightsError
from dflash_jax.generation import CustomDrafter, GenerationOutput, SamplingParams, generate_ids
from dflash_jax.loading import export_drafter, load_drafter, load_target
from dflash_jax.sharding import make_mesh
from dflash_jax.target import Target, init_target, target_forward

__all__ = [
    "ConfigError",
    "CustomDrafter",
    "DFlashError",
    "Drafter",
    "DrafterConfig",
    "GenerationOutput",
    "LoadError",
    "RopeConfig",
    "SamplingParams",
    "Target",
    "TargetConfig",
    "WeightsError",
    "default_target_layer_ids",
    "draft_logits",
    "export_drafter",
    "generate_ids",
    "init_drafter",
    "init_target",
    "load_drafter",
    "load_target",
    "make_mesh",
    "target_forward",
]
