"""`autotune run`: the loop beside a running engine, with its own metrics, until it is told to stop."""

import logging
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry

from kvpilot.agent.control.audit import AuditError, AuditLog
from kvpilot.agent.control.config import RunSettings, parse_listen
from kvpilot.agent.control.controller import Controller
from kvpilot.agent.control.in_force import asked_decision_seconds, decide_every, guard_limits, paces
from kvpilot.agent.control.loaded_policy import LoadedPolicy, load, load_source
from kvpilot.agent.control.log_format import set_up_logging
from kvpilot.agent.control.metrics import AgentMetrics
from kvpilot.agent.control.nouns import Control, Decision, Inputs
from kvpilot.agent.control.server import ControlServer, Heartbeat
from kvpilot.agent.control.state import StateFile
from kvpilot.agent.control.switches import Switches
from kvpilot.agent.control.targets import Target, make_target
from kvpilot.agent.control.tracing import DecisionTracer
from kvpilot.agent.counterfactual.loop import Counterfactual
from kvpilot.agent.guard import Memory
from kvpilot.agent.guard.limits import limits_as_dict
from kvpilot.engine.errors import KVPilotError
from kvpilot.exporter.source import Source
from kvpilot.k8s.control_document import ControlDocument
from kvpilot.k8s.control_source import ControlSource, watch_config_in_pod
from kvpilot.k8s.document_source import DocumentFile, DocumentSource

log = logging.getLogger("kvpilot.agent")
HEALTHY_TICKS = 4  # intervals without a tick, after which /healthz says so
SLOWEST_TICK_SECONDS = 30.0  # requests that time out, one after the other, and a fsync


class Sidecar:
    """Everything of one `autotune run` but its signals. The control document may replace policy and limits."""

    def __init__(
        self, settings: RunSettings, *, loaded: LoadedPolicy, target: Target, source: Source
    ) -> (
        None
    ):  # long: all parts of one process are put together here, in the order in which they need each other
        self.settings = settings
        trained = loaded.trained_seconds
        self.interval_seconds, decision_seconds = paces(settings, None, trained)
        self.audit = AuditLog(settings.audit)
        self.audit.check()
        state = StateFile(settings.state)
        state.check()
        self.registry = CollectorRegistry()
        self.heartbeat = Heartbeat(HEALTHY_TICKS * self.interval_seconds + SLOWEST_TICK_SECONDS)
        self.loaded = loaded
        limits = guard_limits(settings, None, trained)
        self.metrics = AgentMetrics(self.registry, limits)
        self.document = _document(settings)
        self._switches = Switches(
            mode=settings.mode,
            bounds=settings.bounds,
            kill_file=settings.kill_file,
            document=self.document,
            pod_name=settings.pod_name,
            on_document=self._follow,
        )
        self._refused_document = ""  # why the document in force cannot be followed
        self._is_start = True
        self._unannounced = ""  # why the audit log lacks the line of the present setup
        self.counterfactual = Counterfactual.from_settings(settings, self.audit, self.metrics)
        self._tracer = DecisionTracer()
        self.controller = Controller(
            engine=target,
            policy=self.loaded.policy,
            audit=self.audit,
            limits=limits,
            source=source if self.counterfactual is None else self.counterfactual.watch(source),
            window_seconds=decision_seconds,
            decide_every=decide_every(self.interval_seconds, decision_seconds),
            control=self._control,
            state=state,
            deadline_seconds=settings.deadline_seconds,
            fallback=load("threshold").policy if settings.outside == "threshold" else None,
            how_to_restart=target.how_to_restart,
            listener=self._listen,
            span=self._tracer.decision_span,
        )
        self._announce()

    def run(self, stop: threading.Event) -> None:
        with ExitStack() as stack:
            stack.callback(self._tracer.close)
            if isinstance(self.document, ControlSource):
                self.document.start()
                stack.callback(self.document.close)
            if self.settings.listen is not None:
                host, port = parse_listen(self.settings.listen)
                server = stack.enter_context(ControlServer(host, port, self.registry, self.heartbeat))
                log.info("metrics on http://%s:%d/metrics", *server.address)
            if self.counterfactual is not None:
                stack.enter_context(self.counterfactual)
            self.controller.run(stop, lambda: self.interval_seconds)

    def _control(self) -> Control:
        control = self._switches()
        self._tick_started = time.perf_counter()
        if self._unannounced:
            self._announce()
        problem = self._refused_document or self._unannounced
        return replace(control, acts=False, hold=problem) if problem else control

    def _follow(self, document: ControlDocument) -> None:
        """What the document names of policy, limits and pace counts; one that cannot be followed holds everything."""
        asked = asked_decision_seconds(self.settings, document)
        try:
            if document.policy is None:
                loaded = load(self.settings.policy, decision_seconds=asked)
            else:
                loaded = load_source(document.policy, decision_seconds=asked)
        except KVPilotError as error:
            self._refused_document = f"the control document cannot be followed: {error}"
            log.error("%s", self._refused_document)
            return
        self._refused_document = ""
        interval, decision = paces(self.settings, document, loaded.trained_seconds)
        limits = guard_limits(self.settings, document, loaded.trained_seconds)
        controller = self.controller
        controller.limits, controller.window_seconds = limits, decision
        controller.decide_every = decide_every(interval, decision)
        if loaded.digest != self.loaded.digest:
            controller.set_policy(loaded.policy)
            self.loaded = loaded
        self.interval_seconds, self.metrics.limits = interval, limits
        self.heartbeat.patience_seconds = HEALTHY_TICKS * interval + SLOWEST_TICK_SECONDS
        log.info("control document %d: mode %s, policy %s", document.revision, document.mode, loaded.spec)
        self._announce()

    def _announce(self) -> None:
        """The line that a replay begins from. Until it is written, everything is held."""
        loaded = self.loaded
        self.metrics.set_policy(loaded.policy.name, loaded.digest[:12])
        record: dict[str, Any] = {
            "kind": "setup",
            "is_start": self._is_start,
            "time": round(time.time(), 3),
            "version": version("kvpilot"),
            "policy": loaded.policy.name,
            "policy_spec": loaded.spec,
            "policy_hash": loaded.digest,
            "fallback": self.settings.outside,
            "limits": limits_as_dict(self.controller.limits),
        }
        try:
            self.audit.write(record)
            self._unannounced, self._is_start = "", False
        except AuditError as error:
            self._unannounced = str(error)

    def _listen(self, decision: Decision, memory: Memory, inputs: Inputs | None) -> None:
        self.heartbeat.beat()
        self.metrics(decision, memory, inputs)
        self.metrics.took(time.perf_counter() - self._tick_started)
        if self.counterfactual is not None:
            self.counterfactual.note(decision, inputs)


def _document(settings: RunSettings) -> DocumentSource | None:
    file, config_map = settings.control_file, settings.control_config_map
    if config_map is not None:
        watch = watch_config_in_pod(config_map, account=settings.control_account)
        return ControlSource(watch, file=file)
    return None if file is None else DocumentFile(file)


def run_loop(settings: RunSettings) -> int:
    """Runs until SIGTERM or Ctrl-C; the knobs stay where they are. Returns the exit code."""
    set_up_logging(settings.log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    loaded = load(settings.policy, decision_seconds=settings.decision_seconds)
    target = make_target(settings)
    source = target.source(settings)
    try:
        sidecar = Sidecar(settings, loaded=loaded, target=target, source=source)
        log.info(
            "%s, policy %s: observes every %g s, decides every %g s",
            settings.mode if sidecar.document is None else "as the control document says",
            settings.policy,
            *paces(settings, None, loaded.trained_seconds),
        )
        sidecar.run(stop)
    finally:
        source.close()
        target.close()
    refused = ", ".join(f"{reason} {number}" for reason, number in sidecar.controller.refused.most_common())
    log.info("stopped; the knobs stay where they are; held or shrunk: %s", refused or "nothing")
    return 0
