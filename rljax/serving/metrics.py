"""Metrics of the server (`/metrics`) in Prometheus' text format."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rljax.serving.worker import EngineWorker


class _Collector:
    """Collector of the worker's counts, which reads them at every scrape."""

    def __init__(self, worker: EngineWorker, refused: Mapping[int, int]) -> None:
        self._worker, self._refused = worker, refused

    def collect(self) -> Iterator[Metric]:
        worker, statistics = self._worker, self._worker.statistics
        yield GaugeMetricFamily("rljax_active_requests", "Responses being decoded.", worker.active)
        yield GaugeMetricFamily("rljax_waiting_requests", "Responses waiting for a slot.", worker.waiting)
        yield GaugeMetricFamily("rljax_slots", "Responses decoded at a time, at most.", worker.max_slots)
        yield GaugeMetricFamily("rljax_up", "Whether requests are taken.", float(worker.alive))
        endings = CounterMetricFamily("rljax_responses", "Responses by how they ended.", labels=["ending"])
        for ending, count in sorted(worker.endings.items()):
            endings.add_metric([ending], count)
        yield endings
        refused = CounterMetricFamily("rljax_refused_requests", "Requests refused.", labels=["status"])
        for status, count in sorted(self._refused.items()):
            refused.add_metric([str(status)], count)
        yield refused
        for name, description, value in (
            ("rljax_prompt_tokens", "Prompt tokens prefilled.", statistics.prefilled_tokens),
            ("rljax_response_tokens", "Response tokens sampled.", statistics.tokens),
            ("rljax_forward_passes", "Forward passes of decoding.", statistics.steps),
            ("rljax_drafted_tokens", "Draft tokens verified.", statistics.drafted),
            ("rljax_accepted_tokens", "Draft tokens accepted.", statistics.accepted),
        ):
            yield CounterMetricFamily(name, description, value)


def metrics_text(worker: EngineWorker, refused: Mapping[int, int]) -> bytes:
    """Returns all metrics.

    Args:
      refused: requests refused, by HTTP status.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(worker, refused))
    return generate_latest(registry)
