"""What a step's duration depends on, read off the batch and the pool in the same way for engine and simulator."""

from typing import NamedTuple

from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.storage import CountingStorage
from kvpilot.engine.request import ScheduledRequest


class StepFeatures(NamedTuple):
    """`kv_bytes[l]`, `converted[l]`: by ladder level; bytes count a page's scales and its empty places too."""

    prefill_tokens: int
    prefill_attention: int  # pairs of a prefilled token and a token it attends to
    prefill_context: int  # tokens computed before, of the requests that prefill
    decode_sequences: int
    sampled_rows: int  # tokens of which the logits are computed
    kv_bytes: tuple[int, ...]  # of the pages that decoding sequences read
    converted: tuple[int, ...]  # pages re-encoded since the step before
    moved_bytes: int  # by compaction since the step before


class FeatureReader:
    """Remembers what it has already counted; call `read` once per step, before it runs."""

    def __init__(self, pool: KVPool, storage: CountingStorage) -> None:
        self._pool = pool
        self._storage = storage
        self._converted = list(storage.converted)
        self._none = (0,) * len(storage.converted)
        self._moved_bytes = storage.moved_bytes

    def read(self, batch: list[ScheduledRequest]) -> StepFeatures:
        prefill_tokens = prefill_attention = prefill_context = decode_sequences = sampled_rows = 0
        for _, start, num_new, samples in batch:
            sampled_rows += samples
            if num_new == 1:
                decode_sequences += 1
            else:
                prefill_tokens += num_new
                prefill_attention += num_new * start + num_new * (num_new + 1) // 2
                prefill_context += start
        pool, storage = self._pool, self._storage
        kv_bytes = [num * pool.page_bytes[level] for level, num in enumerate(pool.page_reads)]
        converted = self._none
        if storage.converted != self._converted:
            converted = tuple([num - self._converted[level] for level, num in enumerate(storage.converted)])
            self._converted = list(storage.converted)
        moved_bytes = storage.moved_bytes - self._moved_bytes
        self._moved_bytes = storage.moved_bytes
        counts = (prefill_tokens, prefill_attention, prefill_context, decode_sequences, sampled_rows)
        memory = (tuple(kv_bytes), converted, moved_bytes)
        return tuple.__new__(StepFeatures, (*counts, *memory))  # cheaper than its own constructor
