"""This engine, in process: `Engine.step` until all requests have ended."""

import time
from importlib.metadata import version

import torch
from worker import Timing

from kvpilot.engine import kernels
from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.load import load_model
from kvpilot.engine.request import SamplingParams

MAX_BATCH = 64


class Contender:
    def __init__(self, model_path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        config = EngineConfig(knobs=Knobs(max_batch=MAX_BATCH))
        llama = load_model(model_path).llama
        self.engine = build_engine(llama, config)
        self.version = f"kvpilot {version('kvpilot')}, {llama.dtype}, kernels {kernels.IMPLEMENTATION}"
        self._count = 0

    def run(self, prompts: list[list[int]], num_output_tokens: int) -> Timing:
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        begin = time.perf_counter()
        requests = []
        for prompt in prompts:
            self._count += 1
            requests.append(self.engine.add_request(f"request-{self._count}", prompt, sampling))
        while any(request.num_output_tokens == 0 for request in requests):
            self.engine.step()
        first, num_early = time.perf_counter(), sum(request.num_output_tokens for request in requests)
        while self.engine.has_work():
            self.engine.step()
        end = time.perf_counter()
        num_tokens = sum(request.num_output_tokens for request in requests)
        assert num_tokens == len(prompts) * num_output_tokens
        return Timing(
            total_seconds=end - begin, decode_seconds=end - first, decode_tokens=num_tokens - num_early
        )
