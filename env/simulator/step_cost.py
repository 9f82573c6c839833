"""The arithmetic of a step's duration, with the weights of a LatencyProfile laid out by ladder level."""

from collections.abc import Sequence

from kvpilot.engine.step_features import StepFeatures

TICK = 2.0**-20  # seconds; durations are whole ticks, so that their sums are exact

Ramp = tuple[tuple[int, float], ...]  # (from this count on, seconds per further one), rising counts


class StepCost:
    """`per_step` are fixed, prefill_token, prefill_pair, prefill_context and sequence of the profile."""

    def __init__(
        self,
        per_step: Sequence[float],
        moved_byte: float,
        *,
        kv_byte: list[float],
        convert: list[float],
        rows: Ramp,
        sampled: Ramp,
    ) -> None:
        self._fixed: float = per_step[0]
        self._prefill_token: float = per_step[1]
        self._prefill_pair: float = per_step[2]
        self._prefill_context: float = per_step[3]
        self._sequence: float = per_step[4]
        self._moved_byte = moved_byte
        self._kv_byte = kv_byte
        self._convert = convert
        self._rows = rows
        self._sampled = sampled

    def seconds(self, features: StepFeatures) -> float:
        """Duration of the step: a multiple of TICK, at least one."""
        (
            prefill_tokens,
            prefill_pairs,
            prefill_context,
            sequences,
            sampled_rows,
            kv_bytes,
            converted,
            moved_bytes,
        ) = features
        seconds = (
            self._fixed
            + self._prefill_token * prefill_tokens
            + self._prefill_pair * prefill_pairs
            + self._prefill_context * prefill_context
            + self._sequence * sequences
            + self._moved_byte * moved_bytes
        )
        if self._rows:
            seconds += ramp_seconds(self._rows, prefill_tokens + sequences)
        if self._sampled:
            seconds += ramp_seconds(self._sampled, sampled_rows)
        for level, num_bytes in enumerate(kv_bytes):
            seconds += self._kv_byte[level] * num_bytes
            if converted[level]:
                seconds += self._convert[level] * converted[level]
        return max(round(seconds / TICK), 1) * TICK


def ramp_seconds(ramp: Ramp, count: int) -> float:
    """The slopes added up over 0 .. `count`."""
    seconds = 0.0
    for index, (start, slope) in enumerate(ramp):
        if count <= start:
            break
        stop = ramp[index + 1][0] if index + 1 < len(ramp) else count
        seconds += slope * (min(count, stop) - start)
    return seconds
