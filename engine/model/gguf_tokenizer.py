"""Builds a tokenizer from the metadata of a GGUF file, token for token as llama.cpp reads it."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.tokenizer import SPACE_MARK, Tokenizer

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Words of Llama 3 and Qwen 2; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """ModelError if the vocabulary is incomplete or of a kind that is not supported."""
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in builders:
        raise ModelError(f"tokenizer.ggml.model={model!r} is not supported: expected {' or '.join(builders)}")
    tokens, types = _array(metadata, "tokens"), _array(metadata, "token_type")
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml has {len(tokens)} tokens but {len(types)} token types")
    backend = builders[model](metadata, tokens)
    added = {CONTROL: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=added[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in added and token
        ]
    )
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        eos_ids=[i for i in ends if i is not None],
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or _is_llama3(metadata)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _is_llama3(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=_is_llama3(metadata))  # pyright: ignore[reportArgumentType]
    # `tokenizers` raises bare Exception
    except Exception as error:
        raise ModelError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _pre_tokenizer(name: str | None) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging; `name` is tokenizer.ggml.pre."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("gpt-2", "gpt2"):
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    digits = {"qwen2": "", "llama-bpe": "{1,3}", "llama3": "{1,3}", "llama-v3": "{1,3}"}
    if name not in digits:
        raise ModelError(
            f"tokenizer.ggml.pre={name!r} is not supported: expected smollm, gpt-2, qwen2 or llama-bpe; "
            f"use the safetensors version of the model, which brings its own tokenizer.json"
        )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % digits[name]), "isolated"), raw])


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece merges the pair whose union scores best: BPE with the merges in order of score."""
    scores = _array(metadata, "scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[i], token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[0])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [(left, right) for _, left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, pairs, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    prefix = (
        [normalizers.Prepend(SPACE_MARK)] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    )
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])  # pyright: ignore
    backend.decoder = decoders.ByteFallback()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _array(metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise ModelError(
            f"tokenizer.ggml.{name} is missing: the file has no usable vocabulary, fetch it again"
        )
    return value
