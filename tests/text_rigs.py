"""Tokenizers made on the spot, and the tiny target of `rigs` with one of them."""

from __future__ import annotations

import dataclasses
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from transformers import PreTrainedTokenizerFast

from dflash_jax.target import Target
from tests.rigs import tiny_target

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
BOS, START, END = range(3)
CHATML = """\
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ 'no thinking\n' }}{% endif %}
{%- endif %}"""


def _byte_symbol(byte: int) -> str:
    """A byte-level vocabulary's name of a byte: printable ones themselves, the others shifted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def byte_level(symbols: bytes, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Byte-level BPE with a token for each given byte, after the special tokens."""
    tokens = [*SPECIAL, *(_byte_symbol(b) for b in symbols), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def sentencepiece_like(metaspace: bool = False) -> Tokenizer:
    """Like Llama 2: spaces are "▁", unknown characters are bytes; two kinds of tokenizer.json."""
    words = ["▁", "a", "b", "▁a", "▁b", "▁▁", "ab", ".", "▁.", "é"]
    tokens = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def as_transformers(
    tokenizer: Tokenizer, chat_template: str | None = CHATML, add_bos: bool = False
) -> PreTrainedTokenizerFast:
    if add_bos:
        tokenizer.post_processor = post.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def small_tokenizer(**options) -> PreTrainedTokenizerFast:
    """111 tokens: printable ASCII, newline, and the bytes of a few longer characters."""
    symbols = bytes([10, *range(32, 127), *sorted(set("é€😀".encode()))])
    return as_transformers(byte_level(symbols, (("h", "e"), ("Ġ", "a"), ("Ã", "©"))), **options)


@cache
def text_target(**options) -> Target:
    """`tiny_target()` (128 ids) with `small_tokenizer`; it stops at `<|im_end|>`."""
    return dataclasses.replace(
        tiny_target(), tokenizer=small_tokenizer(**options), stop_token_ids=(END,), name="tiny"
    )
