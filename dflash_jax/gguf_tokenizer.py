"""The byte-level BPE tokenizer inside a GGUF file, as a Transformers tokenizer.

`AutoTokenizer.from_pretrained(gguf_file=...)` needs PyTorch; this needs only `tokenizers`.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_jax.errors import LoadError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp token types
# Splits before BPE, by `tokenizer.ggml.pre`; the patterns are those of the models' tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(kind: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama-bpe")
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    return byte_level


def load_tokenizer(metadata: dict[str, Any], path: Path, context_length: int) -> Any:
    """Metadata of a GGUF file -> a Transformers tokenizer with special tokens and chat template.

    Raises:
      LoadError: a tokenizer model or a split that is not supported.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import, needed only here

    def get(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    model, kind = get("model"), get("pre")
    if model != "gpt2" or kind not in ("smollm", "gpt-2", "llama-bpe"):
        raise LoadError(
            f"{path}: tokenizer.ggml.model {model!r} with pre {kind!r} is not supported (only "
            "'gpt2' with smollm, gpt-2 or llama-bpe)"
        )
    tokens, types = get("tokens"), get("token_type") or []
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    for flag, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(t, special=special, normalized=False)
            for t, type_ in zip(tokens, types, strict=False)
            if type_ == flag
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    bos = get("bos_token_id")
    # llama.cpp prepends the first token for llama-bpe unless the file says otherwise.
    add_bos = kind == "llama-bpe" if get("add_bos_token") is None else get("add_bos_token")
    if add_bos and bos is not None:
        token = tokens[bos]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{token} $A",
                    pair=f"{token} $A {token}:1 $B:1",
                    special_tokens=[(token, bos)],
                ),
            ]
        )
    names = {"bos_token": bos, "eos_token": get("eos_token_id")}
    names |= {"unk_token": get("unknown_token_id"), "pad_token": get("padding_token_id")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        **{name: tokens[i] for name, i in names.items() if i is not None},
    )
