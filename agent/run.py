"""`autotune run`: the loop beside a running engine."""

import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from kvpilot.agent.audit import AuditLog
from kvpilot.agent.client import EngineClient, read_token
from kvpilot.agent.controller import Controller, Mode
from kvpilot.agent.guard import GuardLimits, intervals
from kvpilot.agent.policies import load_policy
from kvpilot.engine.errors import ConfigError

log = logging.getLogger("kvpilot.agent")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    token_file: Path
    url: str = "http://127.0.0.1:8000"
    admin_url: str = "http://127.0.0.1:8001"
    mode: Mode = Mode.ADVISORY
    policy: str = "threshold"
    interval_seconds: float = 10.0  # between two observations
    decide_every: int = 3  # observations per decision
    min_change_seconds: float = 30.0  # between two changes of a knob
    timeout_seconds: float = 5.0  # of each request to the engine
    audit: Path = Path("autotune-audit.jsonl")

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, bounds: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected {bounds}")

        check(0.1 <= self.interval_seconds <= 3600, "interval_seconds", "a number in [0.1, 3600]")
        check(1 <= self.decide_every <= 100, "decide_every", "an integer in [1, 100]")
        check(self.min_change_seconds >= 0, "min_change_seconds", ">= 0")
        check(0.1 <= self.timeout_seconds <= 60, "timeout_seconds", "a number in [0.1, 60]")

    @property
    def limits(self) -> GuardLimits:
        window = self.interval_seconds * self.decide_every
        return GuardLimits(
            min_interval_seconds=intervals(self.min_change_seconds),
            max_age_seconds=3 * self.interval_seconds + self.timeout_seconds,
            max_window_seconds=max(300.0, 3 * window),
        )


def run_loop(config: RunConfig) -> int:
    """Runs until SIGTERM or Ctrl-C; the knobs stay where they are. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    policy = load_policy(config.policy)
    client = EngineClient(
        url=config.url,
        admin_url=config.admin_url,
        token=read_token(config.token_file),
        timeout_seconds=config.timeout_seconds,
    )
    audit = AuditLog(config.audit)
    audit.check()
    controller = Controller(
        engine=client,
        policy=policy,
        audit=audit,
        mode=config.mode,
        limits=config.limits,
        window_seconds=config.interval_seconds * config.decide_every,
        decide_every=config.decide_every,
    )
    log.info(
        "%s, policy %s: observes every %g s, decides every %g s",
        config.mode,
        config.policy,
        config.interval_seconds,
        config.interval_seconds * config.decide_every,
    )
    try:
        controller.run(stop, config.interval_seconds)
    finally:
        client.close()
    refused = ", ".join(f"{reason} {number}" for reason, number in controller.refused.most_common())
    log.info("stopped; the knobs stay where they are; held or shrunk: %s", refused or "nothing")
    return 0
