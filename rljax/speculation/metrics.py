"""The metrics of speculation."""

from collections.abc import Mapping

from drafters.base import Drafter
from drafters.validation import usable_metrics
from rljax.requests import DecodeStatistics
from rljax.speculation.drafter_calls import drafter_call
from rljax.speculation.idle_requests import IdleRequests


def speculation_metrics(
    statistics: DecodeStatistics, drafters: Mapping[str, Drafter], idle: IdleRequests
) -> dict[str, float]:
    """Metrics of speculation in the rollouts of `statistics`, with those that drafters report.

    Names begin with "speculation/"; those of the second drafter and later ones also with the drafter's name.
    """
    waited = statistics.host_seconds + statistics.device_seconds + statistics.draft_seconds
    metrics = {
        "accept_length": statistics.accept_length,
        "acceptance": statistics.accepted / max(statistics.drafted, 1),
        "verified_per_token": statistics.rows / max(statistics.tokens, 1),
        "speculated_share": statistics.verified / max(statistics.steps, 1),
        "drafted": statistics.drafted,
        "accepted": statistics.accepted,
        "unusable": statistics.unusable,
        "host_share": statistics.host_seconds / max(waited, 1e-9),
        "idle_share": statistics.idle_seconds
        / max(statistics.idle_seconds + statistics.device_seconds, 1e-9),
    }
    if not all(drafter.on_host for drafter in drafters.values()):
        metrics["draft_share"] = statistics.draft_seconds / max(waited, 1e-9)
    if any(drafter.training is not None for drafter in drafters.values()):
        metrics["train_share"] = statistics.train_seconds / max(waited, 1e-9)
    metrics |= idle.metrics(statistics, waited)
    for number, (name, drafter) in enumerate(drafters.items()):
        prefix = f"{name}/" if number else ""
        taken = [other.removeprefix(prefix) for other in metrics if other.startswith(prefix)]
        with drafter_call(name, "metrics"):
            reported = usable_metrics(drafter.metrics(), taken)
        metrics |= {prefix + key: value for key, value in reported.items()}
    return {f"speculation/{name}": value for name, value in metrics.items()}
