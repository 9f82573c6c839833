"""Reads a checkpoint from a directory of safetensors with config.json and tokenizer.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.checkpoint import Checkpoint, check_tensors
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.hf_config import model_config
from kvpilot.engine.model.tokenizer import Tokenizer

T = TypeVar("T")
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{part: f"self_attn.{part}.weight" for part in ("q_norm", "k_norm")},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def read_safetensors(directory: Path, *, has_weights: bool = True) -> Checkpoint:
    """ModelError if a file is missing or broken, or the model is not supported.

    Without weights no tensor can be read, and whether there is a bias on q, k and v is as config.json has it.
    """
    raw = _json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = _json(generation_path) if generation_path.exists() else {}
    files, shapes = _index(directory) if has_weights else ({}, {})
    has_bias = raw.get("attention_bias", raw.get("model_type") == "qwen2")
    if has_weights:
        has_bias = hugging_face_name("layers.0.q_bias") in shapes
    try:
        config = model_config(raw, generation, has_qkv_bias=has_bias)
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from error
    if has_weights:
        _check(directory, config, shapes)
    handles: dict[Path, Any] = {}  # open for as long as the checkpoint is: a header is parsed once

    def get(name: str) -> torch.Tensor:
        file_name = hugging_face_name(name)
        path = files[file_name]
        if path not in handles:
            handles[path] = _open(path)
        tensor = _reading(path, lambda: handles[path].get_tensor(file_name))
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{path}: tensor {file_name} is {kind}: expected float32, float16 or bfloat16")
        return tensor if tensor.dtype == torch.bfloat16 else tensor.float()

    def load() -> Tokenizer:
        return _tokenizer(directory, config.eos_token_ids, config.bos_token_id)

    return Checkpoint(path=directory, config=config, get=get, load_tokenizer=load)


def _check(directory: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    inverse_frequencies = [name for name in shapes if name.endswith("rotary_emb.inv_freq")]
    head = [_TOP["head"]] if config.tied_embeddings else []  # some writers store the table twice
    check_tensors(directory, config, shapes, hugging_face_name, ignored=[*inverse_frequencies, *head])


def hugging_face_name(name: str) -> str:
    """A canonical tensor name as Hugging Face spells it."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}"


def _index(directory: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """File and shape of every tensor, from the headers of all *.safetensors."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        paths = [directory / Path(name).name for name in names]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} holds no *.safetensors: expected the files of a Hugging Face model")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with _open(path) as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        files |= dict.fromkeys(found, path)
        shapes |= found
    return files, shapes


def _open(path: Path) -> Any:
    return _reading(path, lambda: safe_open(path, framework="pt"))


def _reading(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: fetch all files of the model") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or corrupt: {error}; delete it and fetch it again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}; expected a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch it again")
    return value


def _tokenizer(directory: Path, eos_ids: tuple[int, ...], bos_id: int | None) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing: the model's tokenizer must be in the tokenizer.json format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # `tokenizers` raises bare Exception
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    settings_path = directory / "tokenizer_config.json"
    settings = _json(settings_path) if settings_path.exists() else {}
    probe = backend.encode("", add_special_tokens=True).ids  # the post-processor's own prefix
    try:
        return Tokenizer(
            backend,
            eos_ids=eos_ids,
            bos_id=bos_id,
            add_bos=settings.get("add_bos_token") or (bos_id is not None and probe[:1] == [bos_id]),
            chat_template=_chat_template(directory, settings),
        )
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from error


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
