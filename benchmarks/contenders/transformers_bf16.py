"""HF transformers `generate` on the weights of the GGUF file, in bfloat16. All prompts have one length: no padding."""

import time
from pathlib import Path

import torch
import transformers  # pyright: ignore[reportMissingImports]
from worker import Timing


class FirstTokenClock(transformers.StoppingCriteria):
    """Never stops; notes when the first call comes, which is right after the first token of the batch."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Contender:
    dtype = torch.bfloat16
    dequantize = True

    def __init__(self, model_path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        path = Path(model_path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=self.dtype,
            quantization_config=transformers.GgufConfig(dequantize=self.dequantize),
        )
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_output_tokens: int) -> Timing:
        tokens = torch.tensor(prompts)
        clock = FirstTokenClock()
        begin = time.perf_counter()
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            min_new_tokens=num_output_tokens,
            max_new_tokens=num_output_tokens,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        end = time.perf_counter()
        assert output.shape[1] == tokens.shape[1] + num_output_tokens
        assert clock.first is not None
        return Timing(
            total_seconds=end - begin,
            decode_seconds=end - clock.first,
            decode_tokens=len(prompts) * (num_output_tokens - 1),
        )
