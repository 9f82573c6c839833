"""docs/reliability.md names a test for each of the twenty rules; docs/operate.md flags and settings that there are."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from kvpilot.agent import cli
from kvpilot.agent.control.config import GuardSettings, RunSettings, SloSettings

ROOT = Path(__file__).parents[2]
RULES = [
    line
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
TESTS = "\n".join(
    path.read_text()
    for folder in ("agent", "faults", "k8s")
    for path in (ROOT / "tests" / folder).glob("test_*.py")
)


def test_there_are_twenty_rules():
    assert [int(line.split("|")[1]) for line in RULES] == list(range(1, 21))


@pytest.mark.parametrize("rule", RULES, ids=lambda line: line.split("|")[1].strip())
def test_each_rule_names_tests_and_code_that_exist(rule):
    _, _, _, where, proof, _ = rule.split("|")
    names = re.findall(r"\btest_\w+(?!\.py)\b(?!\.py)", proof)
    assert names or "tests/k8s" in proof
    for name in names:
        assert f"def {name}(" in TESTS
    for path in re.findall(r"`((?:guard/|control/|k8s/)[\w/]+)(?:\.(\w+))?", where):
        file = (ROOT if path[0].startswith("k8s") else ROOT / "agent") / f"{path[0]}.py"
        assert file.is_file(), file
        if path[1] and path[1] != "py":
            assert re.search(rf"(def|class) {path[1]}\b", file.read_text()), path


def test_the_page_for_operators_names_real_settings_and_flags():
    text = (ROOT / "docs" / "operate.md").read_text()
    yaml = text.split("cat > run.yaml <<'END'\n")[1].split("END\n")[0]
    for name in re.findall(r"^(\w+):", yaml, re.MULTILINE):
        assert name in RunSettings.model_fields
    for part, model in (("slo", SloSettings), ("guard", GuardSettings)):
        inner = re.search(rf"^{part}: {{(.*?)}}", yaml, re.MULTILINE)
        assert inner is not None
        assert set(re.findall(r"(\w+):", inner[1])) <= set(model.model_fields)
    commands = get_command(cli.app).commands  # pyright: ignore[reportAttributeAccessIssue]
    for command, rest in re.findall(r"^autotune (run|audit|safe-mode|serve) (.*)$", text, re.MULTILINE):
        known = {option for param in commands[command].params for option in param.opts}
        assert set(re.findall(r"(--[\w-]+)", rest.split("#")[0])) <= known
