"""Every attack of the guard's list against the running loop. Each ends with the same check: no request lost, knobs
within bounds, and the SLO never violated for longer than a decision interval and the settle time together.

The clock is the simulated engine's: the figures are the same on every machine. `-s` prints the rows of the table in
docs/reliability.md.
"""

import math
import resource
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvpilot.agent.control.nouns import Control, Mode, Outcome
from kvpilot.agent.control.switches import Switches
from kvpilot.agent.guard import Reason, Step, default_steps
from kvpilot.agent.policies import load_policy
from kvpilot.engine.config import knob_bounds
from kvpilot.exporter.promql import PromSource
from kvpilot.exporter.scrape import ScrapeError, parse_metrics
from kvpilot.k8s.control_document import ControlDocument
from kvpilot.k8s.document_source import DocumentFile

LOW = {"ttl_seconds": 0.0, "size_factor": 0.0, "max_batch": 1, "kv_level": 0}
HIGH = {"ttl_seconds": 86_400.0, "size_factor": 1.0, "max_batch": 64, "kv_level": 2}
STRANGLE = {"ttl_seconds": 86_400.0, "size_factor": 1.0, "max_batch": 1, "kv_level": 0}  # as bad as it gets
WARM_UP = 120.0


@pytest.fixture
def report(world, request):
    """A row of the table."""
    yield
    name = request.node.name.removeprefix("test_")
    longest, total = max(world.outside, default=0.0), sum(world.outside)
    steps_back = sum(one.outcome is Outcome.STEPPED_BACK for one in world.decisions)
    applied = sum(one.outcome is Outcome.APPLIED for one in world.decisions)
    print(
        f"\n| {name} | {applied} changes, {steps_back} steps back | {longest:g} / {total:g} s | {world.lost} |"
    )


pytestmark = pytest.mark.usefixtures("report")


def written(decisions) -> list[dict]:
    done = (Outcome.APPLIED, Outcome.PENDING, Outcome.STEPPED_BACK)
    return [dict(one.changes) for one in decisions if one.outcome in done]


@pytest.mark.parametrize(
    "extreme",
    [
        lambda call: LOW,
        lambda call: HIGH,
        lambda call: STRANGLE,
        lambda call: LOW if call % 2 else HIGH,
        lambda call: {"max_batch": -(10**30), "kv_level": math.nan, "size_factor": "all", "rm -rf": 1},
    ],
    ids=["low", "high", "strangle", "alternating", "nonsense"],
)
def test_a_policy_that_always_asks_for_extremes(world, make_loop, wishes, extreme):
    controller = make_loop(wishes(extreme))
    world.play(controller, 900)
    bounds, steps = knob_bounds(world.engine.config), default_steps()
    for before, after in zip(world.decisions, world.decisions[1:], strict=False):
        for name, value in after.changes.items():
            assert bounds[name].low <= value <= bounds[name].high
            assert value == steps[name].limit(before.knobs[name], value)
    assert all(1 <= decision.knobs["max_batch"] <= 64 for decision in world.decisions if decision.knobs)
    world.check()


def test_without_the_guard_the_same_policy_ruins_the_service(world, make_loop, human):
    """What the attack above would do: the limits are not met by chance."""
    assert human(STRANGLE).status_code == 200
    for _ in range(60):
        world.advance(15)
    assert max(world.outside) > 300


def test_too_many_reverts_latch_safe_mode_until_a_human_leaves_it(world, make_loop, wishes, reasons):
    controller = make_loop(wishes(lambda call: STRANGLE))
    limits = controller.limits
    controller.limits = type(limits)(**{**vars(limits), "max_reverts_per_hour": 0, "blame_seconds": 60.0})
    decisions = world.play(controller, 900)
    assert controller.memory.safe_mode
    assert Reason.SAFE_MODE in reasons(decisions[-4:])
    assert Outcome.STEPPED_BACK in {decision.outcome for decision in decisions}
    again = make_loop(wishes(lambda call: HIGH))  # a restart does not leave it
    assert written(world.play(again, 300)) == []
    assert controller.state is not None
    controller.state.path.unlink()
    world.play(again, 120)
    assert not again.memory.safe_mode
    world.check()


def test_stale_metrics(world, make_loop, reasons):
    controller = make_loop(load_policy("threshold"))
    world.play(controller, WARM_UP)
    frozen = world.engine.snapshot()
    world.snapshot = lambda: frozen
    world.play(controller, 60)
    decisions = world.play(controller, 300)
    assert reasons(decisions) & {Reason.STALE, Reason.SOURCE, Reason.WINDOW}
    assert written(decisions) == []
    world.snapshot = world.engine.snapshot
    assert {one.outcome for one in world.play(controller, 300)} - {Outcome.HELD}
    world.check()


def test_not_a_number_in_the_metrics(world, make_loop, wishes, reasons):
    controller = make_loop(wishes(lambda call: HIGH))
    world.play(controller, WARM_UP)

    def poison(text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        return b"".join(
            line.rsplit(b" ", 1)[0] + b" NaN\n" if line.startswith(b"kvpilot_requests_waiting{") else line
            for line in lines
        )

    world.metrics = poison
    with pytest.raises(ScrapeError, match="requests_waiting"):
        parse_metrics(poison(_text(world)).decode())
    before = world.knobs
    decisions = world.play(controller, 300)
    assert Reason.SOURCE in reasons(decisions)
    assert written(decisions) == []
    assert world.knobs == before
    world.check()


def _text(world) -> bytes:
    import httpx

    return httpx.get(f"{world.url}/metrics", trust_env=False).content


def test_counter_resets(world, make_loop, wishes, reasons):
    controller = make_loop(wishes(lambda call: {"kv_level": 2}))
    world.play(controller, WARM_UP)
    resets = []

    def restarted():
        real = world.engine.snapshot()
        if len(resets) % 2:  # every other scrape comes from a process that has just begun
            real = type(real)(
                time=real.time,
                values={k: v if _is_gauge(k) else 0.0 for k, v in real.values.items()},
                histograms=real.histograms,
            )
        resets.append(real)
        return real

    world.snapshot = restarted
    before = world.knobs
    decisions = world.play(controller, 300)
    assert Reason.RESET in reasons(decisions)
    assert written(decisions) == []
    assert world.knobs == before
    world.check()


def _is_gauge(series) -> bool:
    from kvpilot.engine.stats import METRICS

    return METRICS[series[0]].kind == "gauge"


@pytest.mark.parametrize(
    ("lie", "reason"),
    [({"pool_free_bytes": 1e15}, Reason.IMPLAUSIBLE), ({"waiting_oldest_seconds": 900.0}, None)],
    ids=["impossible", "plausible"],
)
def test_lying_metrics(world, make_loop, reasons, lie, reason):
    """An impossible value holds. A plausible lie moves the knobs, within all limits, and cannot break the SLO."""
    controller = make_loop(load_policy("threshold"))
    world.play(controller, WARM_UP)

    def lying():
        real = world.engine.snapshot()
        values = {**real.values, **{(name, ()): value for name, value in lie.items()}}
        return type(real)(time=real.time, values=values, histograms=real.histograms)

    world.snapshot = lying
    decisions = world.play(controller, 600)
    if reason is not None:
        assert reason in reasons(decisions)
        assert written(decisions) == []
    else:
        assert written(decisions)
    world.check()


def test_latencies_that_lie_under_the_worst_policy(world, make_loop, wishes):
    """Histograms that always say that all is well: what gives it away are the requests that wait."""
    controller = make_loop(wishes(lambda call: STRANGLE))
    world.play(controller, WARM_UP)
    fine = world.engine.snapshot().histograms

    def flattering():
        real = world.engine.snapshot()
        grown = {
            name: one._replace(counts=tuple(count * (1 + real.time) for count in one.counts))
            for name, one in fine.items()
        }
        return type(real)(time=real.time, values=real.values, histograms=grown)

    world.snapshot = flattering
    world.play(controller, 780)
    world.check()


def test_a_slow_engine(world, make_loop, wishes, reasons):
    controller = make_loop(wishes(lambda call: HIGH), timeout=0.5)
    world.play(controller, WARM_UP)
    world.delay_seconds = 0.7  # more than the client waits
    before = world.knobs
    decisions = world.play(controller, 60)
    assert reasons(decisions) <= {Reason.UNREACHABLE, Reason.CONFLICT}
    assert written(decisions) == []
    assert world.knobs == before
    world.delay_seconds = 0.0
    world.play(controller, 500)
    world.check()


def test_a_partial_apply(world, make_loop, wishes, reasons):
    """The engine says 200 and does half of it: said so, and undone."""
    wanted = {"kv_level": 2, "max_batch": 20}
    controller = make_loop(wishes(lambda call: wanted if call == 1 else {}))
    world.on_patch = lambda body: {
        **body,
        "knobs": {k: v for k, v in body["knobs"].items() if k != "kv_level"},
    }
    before = world.knobs
    decisions = world.play(controller, WARM_UP)
    assert Reason.PARTIAL in reasons(decisions)
    assert Outcome.STEPPED_BACK in {one.outcome for one in decisions}
    assert world.knobs == before
    world.check()


def test_a_lost_lease(world, make_loop, wishes, reasons, tmp_path):
    """A deposed leader writes its older document again, and then a second loop acts beside this one."""
    path = tmp_path / "control.yaml"
    path.write_text(ControlDocument(revision=7, mode="advisory").to_yaml())
    switches = Switches(document=DocumentFile(path))
    controller = make_loop(wishes(lambda call: HIGH), control=switches)
    world.play(controller, WARM_UP)
    path.write_text(ControlDocument(revision=6, mode="auto").to_yaml())
    decisions = world.play(controller, 120)
    assert Reason.HOLD in reasons(decisions)
    assert written(decisions) == []
    path.write_text(ControlDocument(revision=8, mode="auto").to_yaml())
    rival = make_loop(wishes(lambda call: LOW), audit=tmp_path / "rival.jsonl", state=None)
    for _ in range(20):
        world.play(controller, 15)
        world.decisions.append(rival.tick())
    assert Reason.CONFLICT in reasons(world.decisions)
    ours = [one for one in world.decisions if one.outcome is Outcome.APPLIED and not one.is_step_back]
    assert len(ours) <= 4  # each freezes for five minutes when it sees the other
    world.check()


def test_a_human_override(world, make_loop, wishes, human, reasons):
    controller = make_loop(wishes(lambda call: {"max_batch": 64}))
    world.play(controller, WARM_UP)
    assert human({"max_batch": 12, "size_factor": 0.25}).status_code == 200
    decisions = world.play(controller, 285)
    assert Reason.CONFLICT in reasons(decisions)
    assert written(decisions) == []
    assert (world.knobs["max_batch"], world.knobs["size_factor"]) == (12, 0.25)
    assert written(world.play(controller, 180))[0] == {"max_batch": 24}  # from the human's value on
    world.check()


@contextmanager
def disk_full_at(size: int):
    """The kernel refuses to let any file of this process grow beyond `size` bytes, as a full disk or quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_under_the_audit_log(world, make_loop, wishes, reasons, replayed, tmp_path):
    controller = make_loop(wishes(lambda call: HIGH))
    world.play(controller, 45)  # nothing has been changed yet
    before = world.knobs
    with disk_full_at((tmp_path / "audit.jsonl").stat().st_size + 100):
        decisions = world.play(controller, 120)
    assert Reason.AUDIT in reasons(decisions)
    assert written(decisions) == []
    assert world.knobs == before
    assert written(world.play(controller, 60))
    assert replayed().decisions > 0  # the torn line spoils no other
    world.check()


def test_a_disk_that_fills_up_while_a_bad_change_is_on_trial(world, make_loop, wishes, reasons, tmp_path):
    """What undoes a change is on record with the change: a full disk does not keep it in force."""
    controller = make_loop(wishes(lambda call: {"max_batch": 1}))
    controller.limits = replace(controller.limits, steps={"max_batch": Step(factor=64.0, origin=1.0)})
    while not written(world.decisions):
        world.play(controller, 15)
    assert world.knobs["max_batch"] == 1
    with disk_full_at((tmp_path / "audit.jsonl").stat().st_size + 100):
        decisions = world.play(controller, 120)
    assert Reason.AUDIT in reasons(decisions)
    assert world.knobs["max_batch"] == 16
    world.check()


def test_prometheus_down(world, make_loop, wishes, reasons):
    controller = make_loop(wishes(lambda call: HIGH))
    world.play(controller, WARM_UP)
    direct = controller.observer.source
    controller.observer.source = PromSource("http://127.0.0.1:9", timeout_seconds=0.5)
    before = world.knobs
    decisions = world.play(controller, 300)
    assert reasons(decisions) == {Reason.SOURCE}
    assert world.knobs == before
    controller.observer.source.close()
    controller.observer.source = direct
    world.play(controller, 300)
    world.check()


def test_a_policy_that_hangs_or_raises(world, make_loop, wishes, reasons):
    import threading

    release = threading.Event()

    def hang(call: int) -> dict:
        if call == 1:
            release.wait(30)
        raise ZeroDivisionError("a bug in the policy")

    controller = make_loop(wishes(hang), deadline_seconds=0.05)
    decisions = world.play(controller, 360)
    release.set()
    assert {Reason.DEADLINE, Reason.BREAKER} <= reasons(decisions)
    assert written(decisions) == []
    world.check()


def test_no_progress_steps_back(world, make_loop, wishes, reasons):
    """Requests wait and no token comes, while metrics and /health answer."""
    controller = make_loop(wishes(lambda call: {"kv_level": 2} if call == 1 else {}))
    world.play(controller, WARM_UP)
    assert world.knobs["kv_level"] == 2
    still = world.engine.snapshot()

    def stuck():
        values = {**still.values, ("requests_waiting", ()): 9.0, ("requests_received", ()): world.now}
        return type(still)(time=world.now, values=values, histograms=still.histograms)

    world.snapshot = stuck
    decisions = world.play(controller, 180)
    assert Reason.STALLED in reasons(decisions)
    assert world.knobs["kv_level"] == 1
    world.check()


def test_a_loop_that_crashes_after_every_change(world, make_loop, wishes):
    """The next process goes on with the trial: the change is judged all the same."""
    for _ in range(8):
        controller = make_loop(wishes(lambda call: {"max_batch": 1}))
        for _ in range(40):
            if written(world.play(controller, 15)):
                break
    assert Outcome.STEPPED_BACK in {one.outcome for one in world.decisions}
    world.check()


def test_killed_in_the_middle_of_it(world, make_loop, wishes, reasons, tmp_path):
    switch = tmp_path / "kill"
    controller = make_loop(wishes(lambda call: HIGH), control=Switches(mode=Mode.AUTO, kill_file=switch))
    world.play(controller, WARM_UP)
    switch.touch()
    before = world.knobs
    decisions = world.play(controller, 300)
    assert Reason.KILLED in reasons(decisions)
    assert world.knobs == before
    world.check()


def test_a_rollout(world, make_loop, wishes, reasons):
    hold = Control(mode=Mode.AUTO, acts=True, hold="a rollout is under way")
    controller = make_loop(wishes(lambda call: HIGH), control=lambda: hold)
    decisions = world.play(controller, 300)
    assert Reason.HOLD in reasons(decisions)
    assert written(decisions) == []
    world.check()


def test_the_threshold_policy_left_alone_and_its_audit_replays(world, make_loop, replayed):
    controller = make_loop(load_policy("threshold"))
    world.play(controller, 600)
    report = replayed()
    assert report.decisions > 8
    assert report.differences == []
    world.check()
