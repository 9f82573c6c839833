"""The demo's live table: this run now, and the static run at the same moment beside it."""

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpilot.agent.control.controller import Outcome
from kvpilot.agent.demo.recording import Recording, phase_at
from kvpilot.agent.demo.traffic import PHASES

SMOOTH_SAMPLES = 5
SHOWN = (Outcome.APPLIED, Outcome.PENDING, Outcome.EFFECTIVE, Outcome.FAILED)


class LiveTable:
    """A context manager; on a pipe it prints a line now and then instead."""

    def __init__(
        self, console: Console, seconds_per_phase: float, recordings: list[Recording], current: Recording
    ) -> None:
        self.console = console
        self.seconds_per_phase = seconds_per_phase
        self.recordings = [one for one in recordings if one is current or one.samples]
        self.current = current
        self._live = Live(console=console, refresh_per_second=2, auto_refresh=False)
        self._phase = ""

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> "LiveTable":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self) -> None:
        phase = phase_at(PHASES, self.seconds_per_phase, self.current.seconds)
        if self.console.is_terminal:
            self._live.update(self._table(phase), refresh=True)
        elif phase != self._phase:
            self._phase = phase
            done = sum(result.end is not None for result in self.current.results)
            self.say(f"  {self.current.seconds:5.1f} s  {phase}, {done} answers so far")

    def _table(self, phase: str) -> Group:
        end = len(PHASES) * self.seconds_per_phase
        title = f"{self.current.name}: {phase}, {self.current.seconds:.0f} of {end:.0f} s"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for one in self.recordings:
            table.add_column(one.name if one is self.current else f"{one.name}, at this moment", min_width=24)
        columns = [_column(one, self.current.seconds) for one in self.recordings]
        for row, label in enumerate(LABELS):
            table.add_row(label, *(column[row] for column in columns))
        lines = [
            Text(f"{t:5.1f} s  {decision}", overflow="ellipsis", no_wrap=True)
            for t, decision in self.current.decisions
            if decision.outcome in SHOWN
        ]
        return Group(table, *lines[-4:])


LABELS = ("running / waiting", "hit rate", "TTFT p50", "tokens/s", "answers", "KV pages held", "knobs")

SHORT = {"ttl_seconds": "ttl", "size_factor": "size", "max_batch": "batch", "kv_level": "level"}


def _column(recording: Recording, now: float) -> list[str]:
    samples = [sample for sample in recording.samples if sample["t"] <= now][-SMOOTH_SAMPLES:]
    if not samples:
        return [""] * len(LABELS)
    last = samples[-1]
    seconds = sum(sample["seconds"] for sample in samples)
    queries = sum(sample["query_tokens"] for sample in samples)
    hits = sum(sample["hit_tokens"] for sample in samples)
    ttfts = sorted(
        result.ttft_seconds
        for result in recording.results
        if result.ttft_seconds is not None and now - 10 < result.sent + result.ttft_seconds <= now
    )
    done = sum(result.end is not None and result.end <= now for result in recording.results)
    return [
        f"{last['running']:g} / {last['waiting']:g}",
        f"{hits / queries:.0%}" if queries else "-",
        f"{ttfts[len(ttfts) // 2]:.2f} s" if ttfts else "-",
        f"{sum(sample['generation_tokens'] for sample in samples) / seconds:.0f}",
        str(done),
        "  ".join(f"{level} {pages:g}" for level, pages in last["pages"].items() if pages),
        "  ".join(f"{SHORT[name]} {value:g}" for name, value in last["knobs"].items() if value is not None),
    ]
