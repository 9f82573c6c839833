"""HF transformers `generate` on the weights of the GGUF file, in float32."""

import torch
import transformers_bf16


class Contender(transformers_bf16.Contender):
    dtype = torch.float32
