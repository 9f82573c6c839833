"""llama.cpp through llama-cpp-python: parallel sequences in one `llama_decode`, greedy.

Not the package's server, which is slower.
"""

import ctypes
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from worker import Timing

MAX_SEQUENCES = 16
CONTEXT_TOKENS = 512  # per sequence
BATCH_TOKENS = 512  # prompt tokens per llama_decode


class Contender:
    def __init__(self, model_path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            model_path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT_TOKENS * MAX_SEQUENCES
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def run(self, prompts: list[list[int]], num_output_tokens: int) -> Timing:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        length, count = len(prompts[0]), len(prompts)
        per_call = max(1, BATCH_TOKENS // length)
        begin = time.perf_counter()
        tokens: list[int] = []
        for i in range(0, count, per_call):
            some = range(i, min(i + per_call, count))
            tokens += self._decode(
                [(prompts[s][p], p, s, p == length - 1) for s in some for p in range(length)]
            )
        first = time.perf_counter()
        for step in range(num_output_tokens - 1):
            tokens = self._decode([(token, length + step, s, True) for s, token in enumerate(tokens)])
        end = time.perf_counter()
        return Timing(
            total_seconds=end - begin,
            decode_seconds=end - first,
            decode_tokens=count * (num_output_tokens - 1),
        )

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, wants_logits) entries; the most likely next tokens of those that want it."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = llama_cpp.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        num_rows = sum(entry[3] for entry in entries)
        logits = llama_cpp.llama_get_logits(self.context)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * (num_rows * self.num_vocab)))
        rows = np.frombuffer(address.contents, dtype=np.float32).reshape(num_rows, self.num_vocab)
        return rows.argmax(axis=1).tolist()
