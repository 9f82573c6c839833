"""HF transformers `generate` as it loads a GGUF file by itself: weights kept in its blocks, float32."""

import torch
import transformers_bf16


class Contender(transformers_bf16.Contender):
    dtype = torch.float32
    dequantize = False
