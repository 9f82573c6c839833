"""PromQL out of parts. `window` is a range such as 5m; `where` is a selector's inside."""

from dataclasses import dataclass

from kvpilot.dashboards.names import agent, engine

ENGINES = 'model_name=~"$model",instance=~"$instance"'
AGENTS = 'instance=~"$agent"'


@dataclass(frozen=True, kw_only=True)
class Series:
    """Builds expressions over one range and one selection of targets."""

    window: str = "$__rate_interval"
    engines: str = ENGINES
    agents: str = AGENTS
    by: tuple[str, ...] = ()  # labels that every sum keeps

    def gauge(self, name: str, *labels: str, where: str = "", how: str = "sum") -> str:
        return f"{how}{self._by(*labels)}({engine(name)}{self._selector(self.engines, where)})"

    def rate(self, name: str, *labels: str, where: str = "") -> str:
        """Per second; a histogram's name gives the rate of its buckets."""
        return f"sum{self._by(*labels)}(rate({engine(name)}{self._selector(self.engines, where)}[{self.window}]))"

    def quantile(self, q: float, name: str) -> str:
        return f"histogram_quantile({q:g}, {self.rate(name, 'le')})"

    def ratio(self, part: str, whole: str) -> str:
        return f"{self.rate(part)} / {self.rate(whole)}"

    def share_above(self, name: str, limit: float) -> str:
        """Share of a histogram's observations above `limit`, one of its bounds."""
        within = self.rate(name, where=f'le="{float(limit)}"')
        everything = self.rate(name, where='le="+Inf"')
        return f"1 - {within} / {everything}"

    def agent_gauge(self, name: str, *labels: str, where: str = "", how: str = "max") -> str:
        return f"{how}{self._by(*labels)}({agent(name)}{self._selector(self.agents, where)})"

    def agent_increase(self, name: str, *labels: str, where: str = "") -> str:
        return f"sum{self._by(*labels)}(increase({agent(name)}{self._selector(self.agents, where)}[{self.window}]))"

    def agent_quantile(self, q: float, name: str) -> str:
        buckets = f"rate({agent(name)}{self._selector(self.agents, '')}[{self.window}])"
        return f"histogram_quantile({q:g}, sum{self._by('le')}({buckets}))"

    def _by(self, *labels: str) -> str:
        kept = (*self.by, *labels)
        return f" by ({', '.join(kept)}) " if kept else ""

    def _selector(self, targets: str, where: str) -> str:
        inside = ",".join(part for part in (targets, where) if part)
        return f"{{{inside}}}" if inside else ""


def or_none(expression: str, label: str) -> str:
    """Zero, labelled "none", where no series of `label` exists yet: nothing has happened is not no data."""
    return f'({expression}) or label_replace(vector(0), "{label}", "none", "", "")'
