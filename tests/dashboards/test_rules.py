"""Recording and alert rules: promtool's unit tests, which fail when any alert is wrong, and the runbook."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kvpilot.agent.guard import Reason
from kvpilot.dashboards import rules
from kvpilot.dashboards.rules import RUNBOOK, Timing, agent_alerts, engine_alerts, rule_document
from kvpilot.engine.stats import LATENCY_BUCKETS
from kvpilot.env.slo import Slo

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted(Path(__file__).parent.glob("rules*_test.yml"))
ALERTS = [alert.name for alert in (*engine_alerts(Timing()), *agent_alerts(Timing()))]


def run_scenarios(promtool: str, document: dict, directory: Path) -> int:
    """promtool's exit code."""
    rule_file = directory / "rules.yml"
    rule_file.write_text(yaml.safe_dump(document), encoding="utf-8")
    copies = []
    for path in SCENARIOS:
        scenarios = yaml.safe_load(path.read_text(encoding="utf-8"))
        copies.append(directory / path.name)
        copies[-1].write_text(yaml.safe_dump({**scenarios, "rule_files": [str(rule_file)]}), encoding="utf-8")
    return subprocess.run([promtool, "test", "rules", *copies], capture_output=True).returncode


def alert_in(document: dict, name: str) -> tuple[list, dict]:
    return next(
        (group["rules"], rule)
        for group in document["groups"]
        for rule in group["rules"]
        if rule.get("alert") == name
    )


@pytest.mark.e2e
def test_scenarios(prometheus_programs):
    command = [prometheus_programs["promtool"], "test", "rules", *SCENARIOS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("name", ALERTS)
def test_the_scenarios_miss_no_alert(name, prometheus_programs, tmp_path):
    """Without it they fail. (With one that fires too often they do: they compare all alerts.)"""
    document = copy.deepcopy(rule_document())
    siblings, rule = alert_in(document, name)
    siblings.remove(rule)
    assert run_scenarios(prometheus_programs["promtool"], document, tmp_path) != 0


@pytest.mark.e2e
@pytest.mark.parametrize("name", list(rules.recordings(Timing())))
def test_the_scenarios_miss_no_recording(name, prometheus_programs, tmp_path):
    document = copy.deepcopy(rule_document())
    rule = next(rule for rule in document["groups"][0]["rules"] if rule["record"] == name)
    rule["expr"] = f"({rule['expr']}) * 1.5 + 0.01"
    assert run_scenarios(prometheus_programs["promtool"], document, tmp_path) != 0


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_section_in_the_runbook(name):
    runbook = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", runbook, re.M | re.S))
    assert name in sections
    for part in ("**Means.**", "**Look.**", "**Do.**"):
        assert part in sections[name], part
    _, rule = alert_in(rule_document(), name)
    assert rule["annotations"]["runbook"] == f"{RUNBOOK}#{name.lower()}"  # as headings become anchors


def test_the_runbook_speaks_of_no_other_alert():
    runbook = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    assert set(re.findall(r"\bKVPilot[A-Z]\w+", runbook)) == set(ALERTS)


def test_the_slo_is_the_one_that_policies_see():
    slo = Slo()
    assert (
        slo.ttft_seconds,
        slo.inter_token_seconds,
    ) == (rules.TTFT_SLO_SECONDS, rules.INTER_TOKEN_SLO_SECONDS)
    assert {slo.ttft_seconds, slo.inter_token_seconds} <= set(LATENCY_BUCKETS)


def test_refusals_are_called_as_the_guard_calls_them():
    reasons = re.findall(r'reason="([^"]+)"', " ".join(alert.expression for alert in agent_alerts(Timing())))
    assert len(reasons) == 3
    assert set(reasons) <= {reason.value for reason in Reason}
