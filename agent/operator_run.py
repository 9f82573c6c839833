"""The operator as a process: signals, logging, health, and the metrics of pods for its canaries."""

import logging
import signal
import threading
import time
from contextlib import nullcontext

from kvpilot.agent.control.server import ControlServer
from kvpilot.agent.policies import NAMED
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.exporter.scrape import Scraper
from kvpilot.k8s.cluster import Cluster, connect
from kvpilot.k8s.operate import Operator, OperatorConfig

log = logging.getLogger(__name__)
SCRAPE_SECONDS = 3.0
# Without the end of a round for so long: unhealthy. An API server that is away is no reason to restart.
STALLED_SECONDS = 60.0


class Rounds:
    """The operator's health: that its rounds end."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._operator.last_round

    @property
    def is_healthy(self) -> bool:
        return self.age_seconds < STALLED_SECONDS


def scrape(url: str) -> StatsSnapshot:
    """The statistics of one engine now; ScrapeError if it does not answer with them."""
    with Scraper(url, timeout_seconds=SCRAPE_SECONDS) as scraper:
        return scraper.snapshot()


def run_operator(config: OperatorConfig, health_host: str, health_port: int | None) -> int:
    """Runs until SIGTERM or Ctrl-C; returns the exit code. ClusterError if no cluster is configured, ConfigError if
    the port is taken; without `health_port` nothing listens."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    operator = Operator(Cluster(connect(), config.namespace), config, fetch=scrape, policy_names=tuple(NAMED))
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the threads: they inherit it, this one waits
    stop = threading.Event()
    worker = threading.Thread(target=operator.run, args=(stop,))
    with _health_server(operator, health_host, health_port) as server:
        if server is not None:
            log.info("health on http://%s:%d/healthz", *server.address)
        worker.start()
        log.info("operator %s for namespace %s", config.identity, config.namespace)
        while worker.is_alive() and signal.sigtimedwait(signals, 1.0) is None:
            pass
        died = not worker.is_alive()
        stop.set()
        operator.interrupt()
        worker.join()
    if died:
        log.error("the operator's loop has died: see the traceback above")
        return 1
    log.info("stopped; Leases given back, control documents left as they are")
    return 0


def _health_server(operator: Operator, host: str, port: int | None) -> ControlServer | nullcontext[None]:
    if port is None:
        return nullcontext()
    return ControlServer(host, port, registry=None, health=Rounds(operator), setting="health_port")
