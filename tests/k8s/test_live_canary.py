"""Canaries against a real API server, with engines' real /metrics texts at the addresses of the pods."""

import itertools
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from kvpilot.engine.stats import METRICS, StatsRecorder
from kvpilot.exporter.collector import EngineCollector

pytestmark = pytest.mark.e2e
NETWORKS = itertools.count(20)  # one loopback network per test
TTFT = {"metric": "time_to_first_token_seconds", "statistic": "p99", "minSamples": 50}
CANARY = {"warmupSeconds": 0, "observeSeconds": 2, "timeoutSeconds": 60, "gates": [TTFT]}


class Engine:
    """Statistics as an engine keeps them, served at a pod's address."""

    def __init__(self, address: str, port: int) -> None:
        self.recorder, self.time, self.ttft_seconds = StatsRecorder(), 0.0, 0.09
        registry = CollectorRegistry()
        EngineCollector(self._snapshot, model_name="m", info={}, registry=registry)
        self.server, self.thread = start_http_server(port, address, registry)
        self.requests_per_scrape = 1000

    def _snapshot(self):
        """Every look finds one more second of traffic behind the last one."""
        self.time += 1.0
        self.recorder.observe(TTFT["metric"], self.ttft_seconds, self.requests_per_scrape)
        self.recorder.add("requests_received", self.requests_per_scrape)
        gauges = {
            (name, ()): 0.0
            for name, metric in METRICS.items()
            if metric.kind == "gauge" and not metric.labels
        }
        return self.recorder.snapshot(self.time, gauges)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def trial(cluster, start_operator, helpers):
    """Three serving pods; `canary` is the one that will act, and `engines` are by pod."""
    name, network, (port,) = cluster.new_name(), next(NETWORKS), helpers.free_ports(1)
    pods = cluster.deploy(name, 3, port=port, network=network)
    engines = {pod["metadata"]["name"]: Engine(pod["status"]["podIP"], port) for pod in pods}
    start_operator()
    ages = sorted((pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]) for pod in pods)
    yield SimpleNamespace(name=name, engines=engines, canary=ages[0][1])
    for engine in engines.values():
        engine.close()


def test_a_canary_as_good_as_its_baseline_passes_and_goes_on(cluster, trial):
    cluster.create_policy(trial.name, mode="canary", canary=CANARY)
    document = cluster.wait_for_document(trial.name, mode="canary")
    assert document["canary_pods"] == [trial.canary]
    cluster.wait_for_condition(trial.name, "CanaryPassed", "True", "GatesPassed")
    status = cluster.get("KVPolicy", trial.name)["status"]
    assert status["effectiveMode"] == "canary"
    assert status["canary"]["pods"] == [trial.canary]
    (gate,) = status["canary"]["gates"]
    assert (gate["outcome"], gate["baselineSamples"]) == ("Passed", 2 * gate["canarySamples"])
    assert gate["canaryMicro"] == gate["baselineMicro"]
    cluster.wait_for_event(trial.name, "Normal", "CanaryPassedGatesPassed")
    assert cluster.document(trial.name)["canary_pods"] == [trial.canary]


def test_a_canary_with_a_longer_tail_fails_and_stops_acting_until_the_specification_changes(cluster, trial):
    trial.engines[trial.canary].ttft_seconds = 0.4
    cluster.create_policy(trial.name, mode="canary", canary=CANARY)
    cluster.wait_for_condition(trial.name, "CanaryPassed", "False", "GateFailed")
    document = cluster.wait_for_document(trial.name, mode="advisory")
    assert "canary_pods" not in document
    cluster.wait_for_event(trial.name, "Warning", "CanaryPassedGateFailed")
    (gate,) = cluster.get("KVPolicy", trial.name)["status"]["canary"]["gates"]
    assert gate["outcome"] == "Failed"
    trial.engines[trial.canary].ttft_seconds = 0.09
    cluster.patch("Deployment", trial.name, {"metadata": {"annotations": {"looked-at": "again"}}})
    assert cluster.condition(trial.name, "CanaryPassed")["status"] == "False"
    cluster.patch("KVPolicy", trial.name, {"spec": {"canary": {"observeSeconds": 3}}})
    cluster.wait_for_condition(trial.name, "CanaryPassed", "True", "GatesPassed")
    cluster.wait_for_document(trial.name, mode="canary")


def test_too_few_samples_never_pass(cluster, trial):
    trial.engines[trial.canary].requests_per_scrape = 1
    settings = {**CANARY, "observeSeconds": 1, "timeoutSeconds": 4}
    cluster.create_policy(trial.name, mode="canary", canary=settings)
    cluster.wait_for_condition(trial.name, "CanaryPassed", "Unknown", "MissingSamples")
    cluster.wait_for_condition(trial.name, "CanaryPassed", "False", "TimedOut")
    cluster.wait_for_document(trial.name, mode="advisory")


def test_a_pod_without_metrics_never_passes(cluster, trial):
    silent = next(pod for pod in trial.engines if pod != trial.canary)
    trial.engines.pop(silent).close()
    cluster.create_policy(trial.name, mode="canary", canary={**CANARY, "timeoutSeconds": 4})
    cluster.wait_for_condition(trial.name, "CanaryPassed", "False", "TimedOut")
    assert silent in cluster.condition(trial.name, "CanaryPassed")["message"]


def test_a_promoted_canary_lets_all_pods_act(cluster, trial):
    cluster.create_policy(trial.name, mode="canary", canary={**CANARY, "promote": True})
    cluster.wait_for_condition(trial.name, "CanaryPassed", "True", "GatesPassed")
    cluster.wait_for_document(trial.name, mode="auto")


def test_a_verdict_outlives_the_operator_that_reached_it(cluster, trial, start_operator):
    trial.engines[trial.canary].ttft_seconds = 0.4
    cluster.create_policy(trial.name, mode="canary", canary=CANARY)
    cluster.wait_for_condition(trial.name, "CanaryPassed", "False", "GateFailed")
    cluster.stop_operators()
    trial.engines[trial.canary].ttft_seconds = 0.09
    start_operator()
    cluster.patch("KVPolicy", trial.name, {"metadata": {"annotations": {"kvpilot.dev/kill": "true"}}})
    cluster.wait_for_document(trial.name, kill=True)
    assert cluster.condition(trial.name, "CanaryPassed")["reason"] == "GateFailed"
    assert cluster.document(trial.name)["mode"] == "advisory"


def test_without_a_baseline_no_pod_acts(cluster, start_operator):
    name = cluster.new_name()
    cluster.deploy(name, 2)
    start_operator()
    cluster.create_policy(name, mode="canary", canary={**CANARY, "replicas": 2})
    cluster.wait_for_condition(name, "CanaryPassed", "Unknown", "TooFewPods")
    assert "canary_pods" not in cluster.wait_for_document(name, mode="canary")


def test_a_rollout_ends_a_trial(cluster, trial):
    cluster.create_policy(trial.name, mode="canary", canary={**CANARY, "observeSeconds": 50})
    cluster.wait_for_condition(trial.name, "CanaryPassed", "Unknown", "Observing")
    cluster.patch("Deployment", trial.name, {"spec": {"replicas": 4}})
    cluster.wait_for_condition(trial.name, "CanaryPassed", "Unknown", "Holding")
    assert cluster.wait_for_document(trial.name, mode="canary")["hold"]
