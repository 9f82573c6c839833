"""The operator as a process: signals, logging, health, and the metrics of pods for its canaries."""

import logging
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvpilot.agent.policies import NAMED
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.exporter.scrape import Scraper
from kvpilot.k8s.cluster import Cluster, connect
from kvpilot.k8s.operate import Operator, OperatorConfig

log = logging.getLogger(__name__)
SCRAPE_SECONDS = 3.0
STALLED_SECONDS = (
    60.0  # without the end of a round: unhealthy. An API server that is away is no reason to restart
)


def scrape(url: str) -> StatsSnapshot:
    """The statistics of one engine now; ScrapeError if it does not answer with them."""
    with Scraper(url, timeout_seconds=SCRAPE_SECONDS) as scraper:
        return scraper.snapshot()


def run_operator(config: OperatorConfig, health_port: int | None) -> int:
    """Runs until SIGTERM or Ctrl-C; returns the exit code. ClusterError if no cluster is configured."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    operator = Operator(Cluster(connect(), config.namespace), config, fetch=scrape, policy_names=tuple(NAMED))
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the threads: they inherit it, this one waits
    stop = threading.Event()
    worker = threading.Thread(target=operator.run, args=(stop,))
    worker.start()
    log.info("operator %s for namespace %s", config.identity, config.namespace)
    server = _serve_health(operator, health_port) if health_port is not None else None
    while worker.is_alive() and signal.sigtimedwait(signals, 1.0) is None:
        pass
    died = not worker.is_alive()
    stop.set()
    operator.interrupt()
    worker.join()
    if server is not None:
        server.shutdown()
    if died:
        log.error("the operator's loop has died: see the traceback above")
        return 1
    log.info("stopped; Leases given back, control documents left as they are")
    return 0


def _serve_health(operator: Operator, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age = time.monotonic() - operator.last_round
            healthy = self.path == "/healthz" and age < STALLED_SECONDS
            body = f"last round {age:.1f} s ago\n".encode()
            self.send_response(200 if healthy else 503 if self.path == "/healthz" else 404)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not worth a line each."""

    server = ThreadingHTTPServer(("", port), Handler)
    log.info("health on port %d", server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
