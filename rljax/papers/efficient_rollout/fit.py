"""Fitting the roofline's constants to measured passes, and judging them by others.

EfficientRollout, appendix E.3: non-negative least squares of the relative error. Appendix E.4: the share of
held-out passes for which "speculation pays" is predicted rightly.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from rljax.papers.efficient_rollout.roofline import Point, PolicyCosts, Roofline
from rljax.speculation.draft_length import expected_tokens

SIGN_GATE, ERROR_GATE = 0.90, 0.10
"""EfficientRollout's results: share of points with the right sign, and mean error of target times."""

_ACCEPTANCES = (0.5, 0.7, 0.9)  # of the gates
_OVERLAPS = tuple(step / 20 for step in range(21))
_ROUNDS = 20  # rounds of deciding which points memory limits; it settles after two or three
_NO_GAIN = 1e-12  # relative gain of the least squares that counts as none


def fit(costs: PolicyCosts, points: Sequence[Point], overlaps: Sequence[float] = _OVERLAPS) -> Roofline:
    """The constants with the least squared relative error, none of them negative.

    First the policy's constants are fitted, to plain steps and verifying passes; then, with these, the
    drafter's. The paper measures F_eff with large products; here it is fitted to the verifying passes, the
    only products that it has to predict.

    Args:
      costs: bytes and operations of the policy and its drafter.
      points: measured passes of every kind, of more shapes than there are constants.
      overlaps: values of `overlap` to choose from; (1.0,) is the paper's roofline.

    Raises:
      ValueError: a kind of point is missing.
    """
    if missing := {"plain", "verify", "draft"} - {point.kind for point in points}:
        raise ValueError(f"no points of kind {', '.join(sorted(missing))}: nothing to fit their constants to")
    passes = [point for point in points if point.kind != "draft"]
    solved = [(_solve(_pass_terms(costs, passes), overlap), overlap) for overlap in overlaps]
    ((byte, kv_byte, flop, attention_flop, slot, verified_slot, verifying), _), overlap = min(
        solved, key=lambda solution: solution[0][1]
    )
    drafts = [point for point in points if point.kind == "draft"]
    terms = _draft_terms(costs, drafts, kv_byte, flop, attention_flop)
    (draft_byte, draft_flop, draft_slot), _ = _solve(terms, overlap)
    return Roofline(
        costs,
        byte=float(byte),
        kv_byte=float(kv_byte),
        flop=float(flop),
        attention_flop=float(attention_flop),
        slot=float(slot),
        verified_slot=float(verified_slot),
        verifying=float(verifying),
        draft_byte=float(draft_byte),
        draft_flop=float(draft_flop if costs.integer_drafts else flop),
        draft_slot=float(draft_slot),
        overlap=overlap,
    )


@dataclasses.dataclass(frozen=True)
class _Terms:
    """The seconds of P points as a function of K unknowns: linear, given which part is the larger one.

    Attributes:
      memory, computing, rest: float [P, K], the factor of each unknown in that part.
      known_memory, known_computing: float [P], seconds that are known already.
      intensity: float [P], operations per byte. Memory limits the points of low intensity, whatever the
        unknowns are.
      seconds: float [P], measured.
    """

    memory: np.ndarray
    computing: np.ndarray
    rest: np.ndarray
    known_memory: np.ndarray
    known_computing: np.ndarray
    intensity: np.ndarray
    seconds: np.ndarray

    def parts(self, unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of reading and of computing, float [P] each."""
        return self.memory @ unknowns + self.known_memory, self.computing @ unknowns + self.known_computing

    def squared_error(self, unknowns: np.ndarray, overlap: float) -> float:
        """Sum of the squared relative errors."""
        memory, computing = self.parts(unknowns)
        both = np.maximum(memory, computing) + (1.0 - overlap) * np.minimum(memory, computing)
        return float(np.sum(((both + self.rest @ unknowns) / self.seconds - 1.0) ** 2))


def _pass_terms(costs: PolicyCosts, points: Sequence[Point]) -> _Terms:
    """Terms of plain steps and verifying passes.

    Unknowns: byte, kv_byte, flop, attention_flop, slot, verified_slot, verifying.
    """
    batch, context, rows, attended = _columns(points)
    verify = np.array([point.kind == "verify" for point in points], float)
    nothing, one = np.zeros(len(points)), np.ones(len(points))
    memory = [one * costs.weight_bytes, costs.kv_bytes * batch * context]
    computing = [costs.dense_flops * rows, costs.attention_flops * context * attended]
    return _Terms(
        memory=np.stack([*memory, *[nothing] * 5], axis=1),
        computing=np.stack([nothing, nothing, *computing, *[nothing] * 3], axis=1),
        rest=np.stack([*[nothing] * 4, (1 - verify) * batch, verify * batch, verify], axis=1),
        known_memory=nothing,
        known_computing=nothing,
        intensity=sum(computing) / sum(memory),
        seconds=np.array([point.seconds for point in points]),
    )


def _draft_terms(
    costs: PolicyCosts, points: Sequence[Point], kv_byte: float, flop: float, attention_flop: float
) -> _Terms:
    """Terms of draft steps.

    Unknowns: draft_byte, draft_flop, draft_slot. Only one of the last two is fitted, since both grow with the
    batch alone. Where the drafter multiplies as the policy does, its operations take as long (the paper's
    case); where they are of integers, they have a time of their own, which includes what slots add.
    """
    batch, context, _, _ = _columns(points)
    nothing, one = np.zeros(len(points)), np.ones(len(points))
    projections = costs.projection_flops * batch
    known = costs.head_flops * batch * flop + costs.attention_flops * context * batch * attention_flop
    integer = costs.integer_drafts
    return _Terms(
        memory=np.stack([one * costs.draft_bytes, nothing, nothing], axis=1),
        computing=np.stack([nothing, projections if integer else nothing, nothing], axis=1),
        rest=np.stack([nothing, nothing, nothing if integer else batch], axis=1),
        known_memory=costs.kv_bytes * batch * context * kv_byte,
        known_computing=known if integer else known + projections * flop,
        intensity=projections / costs.draft_bytes,
        seconds=np.array([point.seconds for point in points]),
    )


def _columns(points: Sequence[Point]) -> tuple[np.ndarray, ...]:
    """Batch, context, rows and attended, float [P] each."""
    fields = ("batch", "context", "rows", "attended")
    return tuple(np.array([getattr(point, name) for point in points], float) for name in fields)


def _solve(terms: _Terms, overlap: float) -> tuple[np.ndarray, float]:
    """The unknowns, float [K], and their squared error.

    Guesses which points memory limits, solves the problem that is then linear, and reads off which points
    memory limits, until that stays. Begins with several guesses, since it may end in more than one place.
    """
    best, least = np.zeros(terms.memory.shape[1]), math.inf
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        by_memory = terms.intensity <= np.quantile(terms.intensity, share)
        for _ in range(_ROUNDS):
            reading = np.where(by_memory, 1.0, 1.0 - overlap)
            computing = np.where(by_memory, 1.0 - overlap, 1.0)
            matrix = reading[:, None] * terms.memory + computing[:, None] * terms.computing + terms.rest
            known = reading * terms.known_memory + computing * terms.known_computing
            weights = 1.0 / terms.seconds
            unknowns = non_negative_least_squares(
                matrix * weights[:, None], (terms.seconds - known) * weights
            )
            error = terms.squared_error(unknowns, overlap)
            if error < least:
                best, least = unknowns, error
            memory, computed = terms.parts(unknowns)
            if np.array_equal(by_memory, memory >= computed):
                break
            by_memory = memory >= computed
    return best, least


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |matrix @ x - target| (Lawson and Hanson, 1974): float [P, K], [P] -> [K].

    Unknowns leave 0 one by one, the most helpful one first; where that makes others negative, these return
    to 0.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)  # bytes and slots are ten orders of magnitude apart
    matrix = matrix / scale
    solution, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(10 * len(solution)):
        gain = np.where(free, 0.0, matrix.T @ (target - matrix @ solution))
        if gain.max() <= _NO_GAIN * np.linalg.norm(target):
            break
        free[gain.argmax()] = True
        while free.any():
            unbounded = np.zeros_like(solution)
            unbounded[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (unbounded <= 0)
            if not negative.any():
                solution = unbounded
                break
            share = np.min(solution[negative] / (solution[negative] - unbounded[negative]))
            solution = np.where(free, solution + share * (unbounded - solution), 0.0)
            free &= ~(negative & (solution <= _NO_GAIN * solution.max()))
            solution = np.where(free, solution, 0.0)
    return solution / scale


# -- held-out passes ---------------------------------------------------------------------------------------


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

    A verifying pass is checked where `points` hold the plain step over the same batch and context, and the
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
