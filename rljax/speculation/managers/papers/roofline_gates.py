"""Judging a fitted roofline by passes that were held out (EfficientRollout, appendix E.4)."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rljax.speculation.draft_length import expected_tokens
from rljax.speculation.managers.papers.roofline import Point, Roofline

SIGN_GATE, ERROR_GATE = 0.90, 0.10
"""EfficientRollout's results: share of points with the right sign, and mean error of target times."""

_ACCEPTANCES = (0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Gates:
    """Agreement of predictions with points that were not fitted.

    Attributes:
      sign: share of verifying passes for which "speculation pays" is predicted rightly, with all drafts
        accepted (tau = gamma, appendix E.4); None without such passes.
      sign_by_acceptance: the same at several acceptance rates.
      cases: number of passes that `sign` is about.
      paying: number of these passes with which speculation pays as measured. Where that is none or all of
        them, `sign` says little.
      target_error: mean relative error of plain steps; None without plain steps.
      target_median_error, verify_median_error, draft_median_error: median relative errors.
    """

    sign: float | None
    sign_by_acceptance: float | None
    cases: int
    paying: int
    target_error: float | None
    target_median_error: float | None
    verify_median_error: float | None
    draft_median_error: float | None

    @property
    def passed(self) -> bool:
        """Whether the predictions are as good as the published ones. A missing number has not passed."""
        if self.sign is None or self.target_error is None:
            return False
        return self.sign >= SIGN_GATE and self.target_error < ERROR_GATE


def gates(roofline: Roofline, points: Sequence[Point], drafts_itself: bool = True) -> Gates:
    """Compares predictions with measurements.

    A verifying pass is judged where `points` hold the plain step over the same batch and context, and the
    draft step.

    Args:
      roofline: predicts.
      points: measured passes.
      drafts_itself: False where drafts come from the host and cost nothing; then no draft step is needed.
    """
    measured = {(point.kind, point.batch, point.context): point.seconds for point in points}
    full, others, paying = [], [], 0
    for point in points:
        chain = point.rows // point.batch - 1
        plain = measured.get(("plain", point.batch, point.context))
        draft = measured.get(("draft", point.batch, point.context)) if drafts_itself else 0.0
        if point.kind != "verify" or chain < 1 or plain is None or draft is None:
            continue
        # Eq. 1 without tau: what it has to exceed.
        cost = (chain * draft + point.seconds) / plain
        shape = (point.batch, point.context)
        predicted = roofline.verify_seconds(*shape, point.rows, point.attended)
        predicted += chain * roofline.draft_seconds(*shape) if drafts_itself else 0.0
        predicted /= roofline.target_seconds(*shape)
        full.append((chain > cost) == (chain > predicted))
        paying += chain > cost
        for acceptance in _ACCEPTANCES:
            tokens = expected_tokens(acceptance, chain)
            others.append((tokens > cost) == (tokens > predicted))
    errors: dict[str, list[float]] = {"plain": [], "verify": [], "draft": []}
    for point in points:
        errors[point.kind].append(abs(roofline.seconds(point) / point.seconds - 1.0))
    return Gates(
        sign=_mean(full),
        sign_by_acceptance=_mean(others),
        cases=len(full),
        paying=paying,
        target_error=_mean(errors["plain"]),
        target_median_error=_median(errors["plain"]),
        verify_median_error=_median(errors["verify"]),
        draft_median_error=_median(errors["draft"]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(statistics.median(values)) if values else None


def held_out(points: Iterable[Point]) -> tuple[list[Point], list[Point]]:
    """Splits points into those to fit and those for the gates.

    One of every three shapes (batch, context) is held out, with all its passes, spread so that every batch
    and every context is also among those that are fitted.
    """
    points = list(points)
    batches = sorted({point.batch for point in points})
    contexts = sorted({point.context for point in points})

    def is_held(point: Point) -> bool:
        return (batches.index(point.batch) + contexts.index(point.context)) % 3 == 1

    return [p for p in points if not is_held(p)], [p for p in points if is_held(p)]
