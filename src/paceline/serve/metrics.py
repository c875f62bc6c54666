"""Prometheus metrics: speculation's counters, the engine's state, and times of requests under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.stats import EngineStats, FinishedRequest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)  # of whole requests
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)  # of one token
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Observes the requests that an engine has finished, and asks it for the rest when somebody looks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"paceline:{name}", text, buckets=buckets, registry=self._registry)

        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first output token.", _SECONDS)
        self._between = histogram(
            "inter_token_latency_seconds", "Per output token after a choice's first; a step's tokens share its time.",
            _TOKEN_SECONDS,
        )  # fmt: skip
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._http = Counter(
            "paceline:http_requests", "Answers by route and status.", ("path", "status"), registry=self._registry
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Reports this engine's state, too."""
        self._registry.register(_EngineCollector(engine))

    def observe(self, finished: FinishedRequest) -> None:
        """The engine's observer."""
        if finished.queue_seconds is not None:
            self._queue.observe(finished.queue_seconds)
        if finished.first_token_seconds is not None:
            self._first.observe(finished.first_token_seconds)
        for count, seconds in finished.inter_token_seconds:
            for _ in range(count):
                self._between.observe(seconds)
        self._whole.observe(finished.seconds)
        self._prompt.observe(finished.num_prompt_tokens)
        self._generated.observe(finished.num_generation_tokens)

    def count(self, path: str, status: int) -> None:
        """One answer of a known route."""
        self._http.labels(path, str(status)).inc()

    def exposition(self) -> tuple[bytes, str]:
        """All metrics as text, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class _EngineCollector(Collector):
    """Reads a snapshot of the engine for each scrape."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def describe(self) -> list[object]:
        """Nothing: names are known without looking at the engine."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("paceline:num_requests_running", "Choices in the steps.", stats.num_running)
        yield GaugeMetricFamily("paceline:num_requests_waiting", "Choices that wait.", stats.num_waiting)
        yield GaugeMetricFamily(
            "paceline:kv_cache_usage_perc", "Share of K/V blocks held, 0 to 1.", stats.kv_cache_usage
        )
        yield from _counters(stats)


def _counters(stats: EngineStats) -> Iterator[CounterMetricFamily]:
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_cache_queries),
        ("prefix_cache_hits", "Those of them that were there.", stats.num_prefix_cache_hits),
        ("num_preemptions", "Choices put back to be computed again.", stats.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that have begun to answer.", stats.num_prompt_tokens),
        ("generation_tokens", "Output tokens.", stats.num_generation_tokens),
        ("drafter_errors", "Calls of a drafter that failed; their drafts were left out.", stats.num_drafter_errors),
        ("spec_decode_num_drafts", "Drafts verified.", stats.speculation.num_drafts),
        ("spec_decode_num_draft_tokens", "Nodes drafted.", stats.speculation.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Nodes accepted.", stats.speculation.num_accepted_tokens),
    ):
        yield CounterMetricFamily(f"paceline:{name}", text, value)
    speculation = stats.speculation
    for name, label, values in (
        ("request_success", "finished_reason", stats.finished),
        (
            "spec_decode_num_accepted_tokens_per_pos",
            "position",
            {str(i): count for i, count in enumerate(speculation.num_accepted_tokens_per_pos)},
        ),
        ("spec_decode_num_draft_tokens_per_drafter", "drafter", speculation.num_draft_tokens_per_drafter),
        ("spec_decode_num_accepted_tokens_per_drafter", "drafter", speculation.num_accepted_tokens_per_drafter),
    ):
        family = CounterMetricFamily(f"paceline:{name}", f"By {label.replace('_', ' ')}.", labels=[label])
        for value, count in values.items():
            family.add_metric([value], count)
        yield family
