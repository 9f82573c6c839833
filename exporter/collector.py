"""Engine statistics as Prometheus families, built from a snapshot at scrape time."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvpilot.engine.stats import METRICS, Histogram, StatsSnapshot

PREFIX = "kvpilot_"
MODEL_LABEL = "model_name"
TIME_METRIC = "snapshot_time_seconds"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineCollector(Collector):
    """Registers itself in `registry`; `info` (versions, envelope) labels `kvpilot_engine_info`.

    The time of the snapshot is the last family: a text without it is truncated.
    """

    def __init__(
        self,
        snapshot: Callable[[], StatsSnapshot],
        *,
        model_name: str,
        info: Mapping[str, str],
        registry: CollectorRegistry,
    ) -> None:
        self._snapshot = snapshot
        self._model_name = model_name
        self._info = dict(info)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not take a snapshot."""
        return ()

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        series: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in METRICS}
        for (name, labels), value in snapshot.values.items():
            series[name].append((labels, value))
        yield self._info_family()
        for name, metric in METRICS.items():
            if metric.kind == "histogram":
                yield self._histogram_family(name, snapshot.histograms[name])
            else:
                yield self._value_family(name, series[name])
        family = GaugeMetricFamily(
            PREFIX + TIME_METRIC, "Time of these values on the engine's clock", labels=[MODEL_LABEL]
        )
        family.add_metric([self._model_name], snapshot.time)
        yield family

    def _info_family(self) -> Metric:
        help_text = "Versions and envelope of the engine"
        family = GaugeMetricFamily(PREFIX + "engine_info", help_text, labels=[MODEL_LABEL, *self._info])
        family.add_metric([self._model_name, *self._info.values()], 1)
        return family

    def _value_family(self, name: str, series: list[tuple[tuple[str, ...], float]]) -> Metric:
        metric = METRICS[name]
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + name, metric.help, labels=[MODEL_LABEL, *metric.labels])
        for labels, value in series:
            family.add_metric([self._model_name, *labels], value)
        return family

    def _histogram_family(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, METRICS[name].help, labels=[MODEL_LABEL])
        buckets, cumulative = [], 0.0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            cumulative += count
            buckets.append((floatToGoString(bound), cumulative))
        family.add_metric([self._model_name], buckets, histogram.sum)
        return family


def metrics_source(registry: CollectorRegistry) -> Callable[[], tuple[bytes, str]]:
    """What the server's /metrics calls: body and content type."""
    return lambda: (generate_latest(registry), CONTENT_TYPE)
