"""Kill switches rehearsed: a real engine under load, and `autotune run` processes with a policy that always wants
something else. Loaded by the fixture `rehearsal`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvpilot.agent.demo.load import LoadRun
from kvpilot.agent.demo.traffic import Phase, make_sessions
from kvpilot.agent.launch import ServerProcess, launched

SERVE = ["--model", "smollm2", "--pool-mb", "32", "--max-batch", "8", "--max-batch-ceiling", "32"]
CHATS = Phase(
    name="chats",
    sessions_per_second=1.0,
    arrival_share=0.8,
    turns=2,
    first_words=40,
    answer_tokens=12,
    think_seconds=1.0,
    color="",
)
STILL_TICKS = 4  # without a write, after which a switch has worked
INTERVAL = 1.0
RESTLESS = {  # nothing holds this loop back but the switches
    "policy": "random",
    "bounds": {"max_batch": [4, 16]},
    "interval_seconds": INTERVAL,
    "decision_seconds": INTERVAL,
    "slo": {"ttft_p99_seconds": None},
    "guard": {
        "min_change_seconds": 0,
        "budget_steps_per_minute": 1000,
        "max_flips": 100,
        "flip_seconds": 1,
        "freeze_seconds": 1,
    },
}


class Traffic:
    """Chats, one batch of sessions after the other, until it is closed."""

    def __init__(self, url: str) -> None:
        self.url, self.answered, self.lost = url, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        seed = 0
        while not self._stop.is_set():
            seed += 1
            run = LoadRun(url=self.url, model="smollm2", end_seconds=6.0)
            asyncio.run(run.drive(make_sessions((CHATS,), 4.0, seed), drain_seconds=120))
            counts = run.counts()
            self.answered += counts["done"]
            self.lost += sum(counts.values()) - counts["done"]

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Loop:
    """A running `autotune run` and what it left on record."""

    def __init__(self, process: subprocess.Popen[bytes], audit: Path, listen: str, log: Path) -> None:
        self.process, self.audit, self.listen, self.log = process, audit, listen, log

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self.audit.exists():
            return []
        whole = self.audit.read_bytes().rpartition(b"\n")[0]
        records = [json.loads(line) for line in whole.splitlines()]
        return [record for record in records if kind in (None, record["kind"])]

    def applied(self) -> int:
        return sum(record["outcome"] == "applied" for record in self.records("decision"))

    def ticks(self) -> float:
        """Rounds since its start, whatever came of them."""
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        try:
            text = httpx.get(f"http://{self.listen}/metrics", trust_env=False).text
        except httpx.TransportError:  # not listening yet
            return 0.0
        lines = [line for line in text.splitlines() if line.startswith("kvpilot_agent_decisions_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Rehearsal:
    def __init__(
        self,
        engine: ServerProcess,
        folder: Path,
        wait_until: Callable[..., Any],
        free_port: Callable[[], int],
    ) -> None:
        self.engine, self.folder, self.wait_until, self.free_port = engine, folder, wait_until, free_port
        self._loops = 0

    def revision(self) -> int:
        headers = {"Authorization": f"Bearer {self.engine.token}"}
        answer = httpx.get(f"{self.engine.admin_url}/admin/knobs", headers=headers, trust_env=False)
        return answer.raise_for_status().json()["revision"]

    @contextmanager
    def loop(self, *, environment: Mapping[str, str] | None = None, **settings: Any) -> Iterator[Loop]:
        """A new process with an audit log and a state of its own."""
        self._loops += 1
        folder = self.folder / f"loop-{self._loops}"
        folder.mkdir()
        listen = f"127.0.0.1:{self.free_port()}"
        config = {
            **RESTLESS,
            "url": self.engine.url,
            "admin_url": self.engine.admin_url,
            "token_file": str(self.engine.token_file),
            "audit": str(folder / "audit.jsonl"),
            "state": str(folder / "state.json"),
            "listen": listen,
            **settings,
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPILOT_")}
        command = [
            sys.executable,
            "-P",
            "-m",
            "kvpilot.agent.cli",
            "run",
            "--config",
            str(folder / "run.yaml"),
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env={**kept, **(environment or {})}, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield Loop(process, folder / "audit.jsonl", listen, folder / "log")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(20)

    def wait_for_changes(self, loop: Loop, count: int = 2) -> None:
        """Until the loop has changed knobs so many times more."""
        before = loop.applied()
        self.wait_until(
            lambda: loop.ticks() and loop.applied() >= before + count, seconds=60, what=f"changes: {loop.log}"
        )

    def check_still(self, loop: Loop) -> None:
        """Nothing is written for some rounds, by the loop's own record and by the engine's revision."""
        revision, intents, ticks = self.revision(), len(loop.records("intent")), loop.ticks()
        self.wait_until(lambda: loop.ticks() >= ticks + STILL_TICKS, seconds=60, what=f"rounds: {loop.log}")
        assert (self.revision(), len(loop.records("intent"))) == (revision, intents)

    def throw(self, loop: Loop, switch: Callable[[], object]) -> tuple[dict[str, Any], float, int]:
        """The line of the audit log that says why, the seconds until it was there, and writes after the switch."""
        self.wait_for_changes(loop)
        seen = len(loop.records("control"))
        thrown = time.time()
        switch()
        self.wait_until(lambda: len(loop.records("control")) > seen, what=f"the switch: {loop.log}")
        line = loop.records("control")[seen]
        self.check_still(loop)
        late = sum(record["time"] >= thrown for record in loop.records("intent"))
        return line, line["time"] - thrown, late

    def release(self, loop: Loop, back: Callable[[], object]) -> None:
        """Nothing but the switch had held it: knobs change again."""
        back()
        self.wait_for_changes(loop, 1)

    def row(self, switch: str, line: Mapping[str, Any], seconds: float, late: int) -> None:
        """For the table in docs/operate.md: `pytest -s | grep "^|"`."""
        why = line["killed"] or line["hold"] or f"mode {line['mode']}"
        print(f"\n| {switch} | {seconds:.2f} s | {late} | {why} |")


@contextmanager
def rehearsal(
    folder: Path, wait_until: Callable[..., Any], free_port: Callable[[], int]
) -> Iterator[Rehearsal]:
    with launched(SERVE, directory=folder) as engine:
        with Traffic(engine.url) as traffic:
            yield Rehearsal(engine, folder, wait_until, free_port)
        print(f"\n{traffic.answered} requests answered, {traffic.lost} lost")
        assert traffic.answered > 0
        assert traffic.lost == 0
