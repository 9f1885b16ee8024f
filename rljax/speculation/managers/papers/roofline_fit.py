"""Fitting the roofline's constants to measured passes, by non-negative least squares of the relative error.

EfficientRollout, appendix E.3.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from rljax.speculation.managers.papers.policy_costs import PolicyCosts
from rljax.speculation.managers.papers.roofline import Point, Roofline

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
