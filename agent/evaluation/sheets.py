"""The tables of an evaluation, the same for terminal and page; defaults against static tuning come first."""

from kvpilot.agent.evaluation.outcome import BASELINES, FIGURES, Figure, Outcomes
from kvpilot.agent.evaluation.statistics import Estimate
from kvpilot.agent.jobs.sheet import Sheet
from kvpilot.env.replay.report import format_value

NOT_LEARNED = (
    "default",
    "static-best",
    "threshold",
    "hysteresis",
    "hill-climb",
    "bandit",
    "random",
    "oracle",
)
NOTHING = "nothing to win here"


def tuning_sheet(outcomes: Outcomes) -> Sheet:
    """What static tuning alone gives over the engine's defaults: the learned policies get no credit for it."""
    rows = []
    for group, episodes in outcomes.groups().items():
        row = [group, str(len(episodes))]
        for figure in _named("Reward", "Whole answer, mean", "Prefix hit rate", "Pages evicted"):
            before, after = (
                outcomes.mean(label, figure.path, episodes) for label in ("default", "static-best")
            )
            row.append(
                f"{_format(before, figure)} -> {_format(after, figure)}{_ratio(before, after, figure)}"
            )
        rows.append(row)
    header = ["traffic", "episodes", "reward", "mean latency", "hit rate", "evictions"]
    note = "Mean over held-out episodes. This is what tuning the knobs once, offline, gains: it is not the agent's."
    return Sheet("First: engine defaults -> best static setting", header, rows, note)


def policies_sheet(outcomes: Outcomes, group: str) -> Sheet:
    """All figures of all policies on one kind of traffic."""
    episodes = outcomes.groups()[group]
    rows = []
    for figure in FIGURES:
        cells = [_format(outcomes.mean(label, figure.path, episodes), figure) for label in outcomes.labels]
        if any(cell != "-" for cell in cells):
            rows.append([figure.label, *cells])
    for label in outcomes.labels:
        seeds = outcomes.by_seed(label, episodes)
        if len(seeds) > 1:
            rows.append([f"Reward of {label} by seed, lowest to highest"])
            rows[-1] += [
                f"{min(seeds):.3f} to {max(seeds):.3f}" if one == label else "" for one in outcomes.labels
            ]
    note = f"Means over {len(episodes)} episodes; percentiles are means of the episodes' percentiles."
    return Sheet(f"In figures: {group}", ["", *outcomes.labels], rows, note)


def rewards_sheet(outcomes: Outcomes) -> Sheet:
    """Mean reward by policy and traffic, and whether there was anything to win."""
    groups = outcomes.groups()
    rows = []
    for label in outcomes.labels:
        rewards = [outcomes.mean(label, ("reward",), episodes) for episodes in groups.values()]
        rows.append([label, *("-" if reward is None else f"{reward:.3f}" for reward in rewards)])
    gains = [outcomes.oracle_gain(episodes) for episodes in groups.values()]
    if any(gain is not None for gain in gains):
        rows.append(["oracle over static-best", *("-" if gain is None else f"{gain:+.3f}" for gain in gains)])
        verdicts = [outcomes.can_be_won(episodes) for episodes in groups.values()]
        rows.append(["", *(NOTHING if verdict is False else "" for verdict in verdicts)])
    note = "The oracle knows the traffic to come and looks a few minutes ahead; no policy can be expected to reach it."
    return Sheet("Mean reward", ["policy", *groups], rows, note)


def differences_sheet(outcomes: Outcomes, label: str) -> Sheet:
    """A policy against those that credit goes to before it, on the same episodes."""
    baselines = [name for name in BASELINES if name in outcomes.labels and name != label]
    rows = []
    for group, episodes in outcomes.groups().items():
        cells = [_interval(outcomes.difference(label, name, episodes)) for name in baselines]
        rows.append([group, *cells, _gap(outcomes, label, episodes)])
    header = ["traffic", *(f"over {name}" for name in baselines), "gap static-best -> oracle closed"]
    note = "Mean difference in reward over the same episodes, with its 95 % bootstrap interval over episodes."
    return Sheet(f"{label}: what it adds", header, rows, note)


def sentences(outcomes: Outcomes) -> list[str]:
    """The outcome in words: tuning first, then each policy, losses as well as gains."""
    groups = outcomes.groups()
    group, episodes = list(groups.items())[-1]
    latency = [outcomes.mean(name, ("e2e_seconds", "mean"), episodes) for name in ("default", "static-best")]
    tuned = outcomes.difference("static-best", "default", episodes)
    times = f", mean latency {latency[1] / latency[0]:.2f}x" if latency[0] and latency[1] is not None else ""
    said = [f"Static tuning over engine defaults ({group}): reward {_interval(tuned)}{times}."]
    for label in outcomes.labels:
        if label in ("default", "static-best", "oracle"):
            continue
        estimate = outcomes.difference(label, "static-best", episodes)
        said.append(f"{label} over static-best ({group}): {_interval(estimate)}, {_verdict(estimate)}.")
    lost = [name for name, places in groups.items() if outcomes.can_be_won(places) is False]
    if lost:
        said.append(f"{NOTHING[0].upper()}{NOTHING[1:]} (the oracle gains less than .02): {', '.join(lost)}.")
    return said


def learned_labels(outcomes: Outcomes) -> list[str]:
    """Of the policies that were given by their files."""
    return [label for label in outcomes.labels if label not in NOT_LEARNED]


def _verdict(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "from one episode, which says little"
    if estimate.low > 0:
        return "better"
    return "worse" if estimate.high < 0 else "no difference that these episodes could show"


def _gap(outcomes: Outcomes, label: str, episodes: list[int]) -> str:
    if "oracle" not in outcomes.labels:
        return "-"
    closed = outcomes.closed(label, episodes)
    if closed is None:
        return NOTHING
    interval = "" if closed.low is None or closed.high is None else f" [{closed.low:.0%}, {closed.high:.0%}]"
    return f"{closed.value:.0%}{interval}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.3f}"
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _format(value: float | None, figure: Figure) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if figure.form == "reward" else format_value(value, figure.form)


def _ratio(before: float | None, after: float | None, figure: Figure) -> str:
    if figure.form == "reward" or not before or after is None:
        return ""
    return f" ({after / before:.2f}x)"


def _named(*labels: str) -> list[Figure]:
    return [next(figure for figure in FIGURES if figure.label == label) for label in labels]
