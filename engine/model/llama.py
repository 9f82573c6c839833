"""The decoder of the Llama family: everything but attention, which the runner supplies.

Shape suffixes: T tokens of a step, N of them that need logits, H hidden, X the fused q, k and v, V vocabulary.
The residual stream is float32 whatever the compute dtype: rounding it would cost more than all GEMMs do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvpilot.engine import kernels
from kvpilot.engine.kv.codecs.rotation import hadamard
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.linear import Linear, has_fast_bf16

Attend = Callable[[int, Tensor], Tensor]
GetTensor = Callable[[str], Tensor]


class ElementwiseKernels(Protocol):
    """What the decoder computes between GEMMs; `kvpilot.engine.kernels` has it for the CPU, its `gpu` for GPUs."""

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor: ...


def default_dtype() -> torch.dtype:
    """bfloat16 where the CPU is fast at it, else float32."""
    return torch.bfloat16 if has_fast_bf16() else torch.float32


@dataclass(frozen=True, kw_only=True)
class _Layer:
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights in `dtype` and the forward pass. V is computed, and attention's output expected, in the basis
    of `hadamard(head_dim)`: the rotation is folded into the weights of v and o."""

    def __init__(
        self,
        config: ModelConfig,
        get_tensor: GetTensor,
        dtype: torch.dtype,
        ops: ElementwiseKernels = kernels,
    ) -> None:
        """The model computes where `get_tensor` puts its tensors; `ops` must be kernels for that device."""
        self.config = config
        self.dtype = dtype
        self._ops = ops
        embed_VH = get_tensor("embed")
        self._embed_VH = embed_VH.to(dtype)
        self._layers = [_load_layer(config, i, get_tensor, dtype) for i in range(config.num_layers)]
        self._norm = get_tensor("norm").to(dtype)
        head_VH = (embed_VH if config.tied_embeddings else get_tensor("head")).float()
        # What all logits share means nothing, but makes them larger and so more coarsely rounded: without
        # it bf16 is 10 % closer to float32 in mean KL, 28 % in the largest (SmolLM2-135M).
        self._head = Linear((head_VH - head_VH.mean(0)).to(dtype))

    @property
    def device(self) -> torch.device:
        return self._embed_VH.device

    @torch.inference_mode()
    def forward(self, token_ids_T: Tensor, attend: Attend) -> Tensor:
        """int64 ids of the step's tokens, in any order that `attend` knows -> float32 [T, hidden].

        `attend(layer, qkv_TX)` gets [q heads | k heads | v heads] x head_dim, biases and (Qwen3) q and k norms
        applied, before the rotary embedding; it returns [T, num_heads * head_dim] and may overwrite its input.
        The result is not normed yet: `logits` does that, for the rows that need it.
        """
        eps, ops = self.config.rms_eps, self._ops
        residual_TH = self._embed_VH[token_ids_T].float()
        x_TH = ops.rms_norm(residual_TH, self._layers[0].attn_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv_TX = layer.qkv(x_TH)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv_TX, layer.q_norm, layer.k_norm)
            out_TH = layer.o(attend(i, qkv_TX))
            x_TH = ops.add_rms_norm(out_TH, residual_TH, layer.mlp_norm, eps)
            out_TH = layer.down(ops.silu_mul(layer.gate_up(x_TH)))
            if i + 1 < len(self._layers):
                x_TH = ops.add_rms_norm(out_TH, residual_TH, self._layers[i + 1].attn_norm, eps)
            else:
                residual_TH.add_(out_TH)
        return residual_TH

    @torch.inference_mode()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Rows of `forward`'s result -> float32 [N, vocab], shifted so that the mean over the vocabulary is 0."""
        return self._head(self._ops.rms_norm(hidden_NH, self._norm, self.config.rms_eps)).float()

    @torch.inference_mode()
    def write_logits(self, hidden_NH: Tensor, out_NV: Tensor) -> None:
        """`logits` in the compute dtype, into memory of the caller."""
        self._head(self._ops.rms_norm(hidden_NH, self._norm, self.config.rms_eps), out_NV)

    def _norm_heads(self, qkv_TX: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        head_dim, eps = self.config.head_dim, self.config.rms_eps
        q_end = self.config.num_heads * head_dim
        k_end = q_end + self.config.num_kv_heads * head_dim
        for rows, weight in ((qkv_TX[:, :q_end], q_norm), (qkv_TX[:, q_end:k_end], k_norm)):
            normed = self._ops.rms_norm(rows.reshape(-1, head_dim), weight, eps)
            rows.copy_(normed.view(rows.shape))


def _load_layer(config: ModelConfig, i: int, get_tensor: GetTensor, dtype: torch.dtype) -> _Layer:
    def get(part: str) -> Tensor:
        return get_tensor(f"layers.{i}.{part}").float()

    rotation = hadamard(config.head_dim)
    v, v_bias = get("v"), get("v_bias") if config.qkv_bias else None
    o = get("o")
    if rotation is not None:
        rotation = rotation.to(v.device)
        v = _rotate_rows(v, rotation)
        v_bias = None if v_bias is None else _rotate_rows(v_bias, rotation)
        o = (o.view(-1, config.head_dim) @ rotation).view(o.shape)
    bias = None if v_bias is None else torch.cat([get("q_bias"), get("k_bias"), v_bias]).to(dtype)
    return _Layer(
        attn_norm=get("attn_norm").to(dtype),
        qkv=Linear(torch.cat([get("q"), get("k"), v]).to(dtype), bias),
        q_norm=get("q_norm").to(dtype) if config.qk_norm else None,
        k_norm=get("k_norm").to(dtype) if config.qk_norm else None,
        o=Linear(o.to(dtype)),
        mlp_norm=get("mlp_norm").to(dtype),
        gate_up=Linear(torch.cat([get("gate"), get("up")]).to(dtype)),
        down=Linear(get("down").to(dtype)),
    )


def _rotate_rows(weight: Tensor, rotation: Tensor) -> Tensor:
    """The projection (or its bias) whose heads come out multiplied by the symmetric `rotation`."""
    heads = weight.view(-1, rotation.shape[0], *weight.shape[1:])
    return torch.einsum("ij,hj...->hi...", rotation, heads).reshape(weight.shape)
