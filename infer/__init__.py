"""Text in, text out, on top of `dflash_jax`: `generate`, `stream`, and the commands `infer.main`
and `infer.bench`."""

from dflash_jax.generation import GenerationOutput, SamplingParams
from infer.generate import generate
from infer.stream import Stream, stream

__all__ = ["GenerationOutput", "SamplingParams", "Stream", "generate", "stream"]
