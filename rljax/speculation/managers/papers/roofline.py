"""When speculation pays, predicted before anything is decoded: EfficientRollout's roofline toggle.

EfficientRollout, section 3.2 (Eq. 2 and 3) and appendix E.3. A pass takes as long as the slower of reading
memory and computing, and a little more for every slot. With the seconds of a plain step, of a draft step and
of a verifying pass, speculation with chains of gamma drafts is expected to be

    speed-up = tau * T_p / (gamma * T_q + T_V)

times as fast, tau being the tokens that a slot gets from a pass. Large batches saturate the arithmetic, and
verifying is dear; as responses end, it gets cheap. Once it pays, it is left on until the rollout ends.

Bytes and operations are counted from the policy's shape (`policy_costs.py`). How long each
takes is fitted to measured passes, once for a policy and a device (`scripts/calibrate.py`). Four constants
are not in the paper, because a CPU needs them (`docs/paper-managers.md` says why): how much of reading and
computing overlaps, ceilings of their own for attention and for products of integers, and a fixed cost of a
verifying pass.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rljax.engine.buckets import Buckets
from rljax.speculation.managers.papers.policy_costs import PolicyCosts

SIGN_GATE, ERROR_GATE = 0.90, 0.10
"""What EfficientRollout reached: share of points whose sign is right, and mean error of target times."""

MARGIN = 0.05
"""The paper's epsilon: by how much drafting must be expected to be faster."""

_OVERLAPS = tuple(step / 20 for step in range(21))
_ROUNDS = 20  # of deciding which points memory limits; it settles after two or three
_NO_GAIN = 1e-12  # of the least squares, relative
_ACCEPTANCES = (0.5, 0.7, 0.9)

Kind = Literal["plain", "verify", "draft"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured forward pass.

    Attributes:
      kind: a plain decode step, a verifying pass, or a step of drafting.
      batch: slots, B.
      context: positions of every slot that attention reads, S. This engine reads whole cache buckets.
      rows: tokens whose products with weights are computed; `batch` but for verifying passes.
      attended: tokens whose attention is computed; for verifying passes a rectangle of slots and nodes.
      seconds: what it took.
    """

    kind: Kind
    batch: int
    context: int
    rows: int
    attended: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of passes of one policy on one device.

    Constants are seconds per something, not its reciprocal, so that what costs nothing is 0.

    Attributes:
      costs: counts of the policy.
      byte: a byte of the policy's weights; 1 / BW_eff.
      kv_byte: a byte of keys and values; rho / BW_eff.
      flop: an operation of products with weights; 1 / F_eff.
      attention_flop: one of attention; the paper's is `flop`.
      slot: what a slot adds to a plain step, c_T.
      verified_slot: what a slot adds to a verifying pass, c_V.
      verifying: what a verifying pass takes whatever it computes; 0 in the paper.
      draft_byte: a byte of the drafter's weights; eta_D / BW_eff.
      draft_flop: an operation of products with them; `flop` unless they are of integers.
      draft_slot: what a slot adds to a draft step, c_D.
      overlap: share of the shorter of reading and computing that is hidden behind the longer; 1 in the paper.
    """

    costs: PolicyCosts
    byte: float
    kv_byte: float
    flop: float
    attention_flop: float
    slot: float
    verified_slot: float
    verifying: float
    draft_byte: float
    draft_flop: float
    draft_slot: float
    overlap: float

    def target_seconds(self, batch: int, context: float) -> float:
        """Of a plain decode step, T_p."""
        return self._both(*self._of_policy(batch, context, batch, batch)) + self.slot * batch

    def verify_seconds(self, batch: int, context: float, rows: int, attended: int | None = None) -> float:
        """Of a pass that verifies, T_V.

        Args:
          batch, context: see `Point`.
          rows: tokens that are computed, the slots' last ones included; in the paper B * (gamma + 1).
          attended: see `Point`; as many as rows if left out.
        """
        reading = self._of_policy(batch, context, rows, rows if attended is None else attended)
        return self._both(*reading) + self.verified_slot * batch + self.verifying

    def draft_seconds(self, batch: int, context: float) -> float:
        """Of a step of the quantized self-drafter, T_q."""
        costs = self.costs
        memory = costs.draft_bytes * self.draft_byte + costs.kv_bytes * batch * context * self.kv_byte
        computing = costs.projection_flops * self.draft_flop + costs.head_flops * self.flop
        computing += costs.attention_flops * context * self.attention_flop
        return self._both(memory, batch * computing) + self.draft_slot * batch

    def seconds(self, point: Point) -> float:
        """What the pass of a point is predicted to take."""
        if point.kind == "plain":
            return self.target_seconds(point.batch, point.context)
        if point.kind == "draft":
            return self.draft_seconds(point.batch, point.context)
        return self.verify_seconds(point.batch, point.context, point.rows, point.attended)

    def speedup(
        self,
        batch: int,
        context: float,
        chain: int,
        acceptance: float,
        rows: int | None = None,
        attended: int | None = None,
    ) -> float:
        """Of speculation over plain decoding, Eq. 1.

        Args:
          batch, context: see `Point`.
          chain: draft tokens of a slot, gamma.
          acceptance: how likely a draft is accepted whose predecessors are.
          rows, attended: of the verifying pass; all drafts of all slots if left out.
        """
        drafting = chain * self.draft_seconds(batch, context)
        verifying = self.verify_seconds(batch, context, rows or batch * (chain + 1), attended)
        tokens = expected_tokens(acceptance, chain)
        return tokens * self.target_seconds(batch, context) / (drafting + verifying)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Roofline":
        """The inverse of `as_json`; TypeError or KeyError for anything else."""
        return cls(**{**content, "costs": PolicyCosts(**content["costs"])})

    def _of_policy(self, batch: int, context: float, rows: int, attended: int) -> tuple[float, float]:
        """Seconds of reading and of computing."""
        costs = self.costs
        memory = costs.weight_bytes * self.byte + costs.kv_bytes * batch * context * self.kv_byte
        attention = costs.attention_flops * context * attended * self.attention_flop
        return memory, costs.dense_flops * rows * self.flop + attention

    def _both(self, memory: float, computing: float) -> float:
        return max(memory, computing) + (1.0 - self.overlap) * min(memory, computing)


def expected_tokens(acceptance: float, chain: int) -> float:
    """Tokens that a slot gets from a pass over a chain, the one sampled behind it included: tau."""
    return sum(acceptance**depth for depth in range(chain + 1))


# -- fitting -----------------------------------------------------------------------------------------------


def fit(costs: PolicyCosts, points: Sequence[Point], overlaps: Sequence[float] = _OVERLAPS) -> Roofline:
    """The constants that leave the least squared relative error, none of them negative.

    First those of the policy, from plain steps and verifying passes, then, with these, the drafter's. The
    paper measures F_eff with large products; here it is fitted to the verifying passes, which are the only
    products it is wanted for.

    Args:
      costs: of the policy.
      points: of every kind; more shapes than there are constants.
      overlaps: of `overlap`, what to choose from; (1.0,) is the paper's roofline.
    """
    if missing := {"plain", "verify", "draft"} - {point.kind for point in points}:
        raise ValueError(f"no points of kind {', '.join(sorted(missing))}: nothing to fit their constants to")
    passes = [point for point in points if point.kind != "draft"]
    solved = [(_solve(_pass_terms(costs, passes), overlap), overlap) for overlap in overlaps]
    ((byte, kv_byte, flop, attention_flop, slot, verified_slot, verifying), _), overlap = min(
        solved, key=lambda found: found[0][1]
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
    """How the seconds of P points depend on K unknowns: linearly, but for which of two parts is the larger.

    Attributes:
      memory, computing, rest: float [P, K], what each unknown is multiplied with.
      known_memory, known_computing: float [P], seconds that are known already.
      intensity: float [P], operations per byte: whatever the unknowns are, memory limits the lower ones.
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
    """Unknowns: byte, kv_byte, flop, attention_flop, slot, verified_slot, verifying."""
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
    """Unknowns: draft_byte, draft_flop, draft_slot.

    Of the last two only one is sought: both grow with the batch alone. Where the drafter multiplies as the
    policy does, its operations take as long (the paper's case); where they are of integers, they take a time
    of their own, what slots add included.
    """
    batch, context, _, _ = _columns(points)
    nothing, one = np.zeros(len(points)), np.ones(len(points))
    projections = costs.projection_flops * batch
    known = costs.head_flops * batch * flop + costs.attention_flops * context * batch * attention_flop
    own = costs.integer_drafts
    return _Terms(
        memory=np.stack([one * costs.draft_bytes, nothing, nothing], axis=1),
        computing=np.stack([nothing, projections if own else nothing, nothing], axis=1),
        rest=np.stack([nothing, nothing, nothing if own else batch], axis=1),
        known_memory=costs.kv_bytes * batch * context * kv_byte,
        known_computing=known if own else known + projections * flop,
        intensity=projections / costs.draft_bytes,
        seconds=np.array([point.seconds for point in points]),
    )


def _columns(points: Sequence[Point]) -> tuple[np.ndarray, ...]:
    """Batch, context, rows and attended, float [P] each."""
    fields = ("batch", "context", "rows", "attended")
    return tuple(np.array([getattr(point, name) for point in points], float) for name in fields)


def _solve(terms: _Terms, overlap: float) -> tuple[np.ndarray, float]:
    """The unknowns and their squared error.

    Which points memory limits is guessed, the rest is linear, and shows which points memory limits; from
    several guesses, as this may end in more than one place.
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

    Unknowns are let go of 0 one by one, the one first that helps most; where that makes others negative, they
    return to 0.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)  # bytes and slots are ten orders of magnitude apart
    matrix = matrix / scale
    found, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(10 * len(found)):
        gain = np.where(free, 0.0, matrix.T @ (target - matrix @ found))
        if gain.max() <= _NO_GAIN * np.linalg.norm(target):
            break
        free[gain.argmax()] = True
        while free.any():
            wanted = np.zeros_like(found)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (wanted <= 0)
            if not negative.any():
                found = wanted
                break
            share = np.min(found[negative] / (found[negative] - wanted[negative]))
            found = np.where(free, found + share * (wanted - found), 0.0)
            free &= ~(negative & (found <= _NO_GAIN * found.max()))
            found = np.where(free, found, 0.0)
    return found / scale


# -- gates -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gates:
    """How well predictions agree with points that nothing was fitted to.

    Attributes:
      sign: share of verifying passes for which "speculation pays" is predicted rightly, with all drafts
        accepted (tau = gamma, appendix E.4); None without any.
      sign_by_acceptance: the same at several acceptance rates.
      cases: passes that `sign` is about.
      paying: of them, those with which speculation pays as measured. Where it is none or all of them, `sign`
        says little.
      target_error: mean relative error of plain steps; None without any.
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
        """Whether they are as good as the published ones. What could not be judged has not passed."""
        if self.sign is None or self.target_error is None:
            return False
        return self.sign >= SIGN_GATE and self.target_error < ERROR_GATE


def gates(roofline: Roofline, points: Sequence[Point], drafts_itself: bool = True) -> Gates:
    """Compares predictions with measurements.

    A verifying pass is judged where `points` hold the plain step, and the draft step unless drafts cost
    nothing (`drafts_itself`), over the same batch and context.
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
    """(points to fit, points for the gates): of every three shapes (batch, context) one is held out, with all
    its passes, spread so that each batch and each context is also among those that are fitted.
    """
    points = list(points)
    batches = sorted({point.batch for point in points})
    contexts = sorted({point.context for point in points})

    def is_held(point: Point) -> bool:
        return (batches.index(point.batch) + contexts.index(point.context)) % 3 == 1

    return [p for p in points if not is_held(p)], [p for p in points if is_held(p)]


# -- the toggle --------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Whether to speculate, and why, in words for a log."""

    on: bool
    reason: str


class Toggle:
    """Speculation off until it is predicted to pay, then on until the rollout ends (Eq. 3, Algorithm 1).

    The active batch shrinks towards where speculation pays, so there is one moment to wait for, and no going
    back and forth where predictions are close.

    Args:
      roofline: predicts.
      chain: draft tokens of a slot, gamma.
      margin: by how much speculation must be predicted to be faster, epsilon.
      buckets: the engine's: batch, context and rows are rounded up to what it computes. None takes them as
        they are.
    """

    def __init__(
        self,
        roofline: Roofline,
        chain: int,
        margin: float = MARGIN,
        buckets: Buckets | None = None,
    ) -> None:
        self.roofline, self.chain, self.margin = roofline, chain, margin
        self.buckets = buckets
        self.begin()

    def begin(self, chain: int | None = None) -> None:
        """A rollout begins; `chain` is another gamma from here on."""
        self._since: str | None = None
        if chain is not None:
            self.chain = chain

    def __call__(self, batch: int, mean_context: float, acceptance: float, standing_by: int = 0) -> Verdict:
        """Whether to speculate now.

        Args:
          batch: active slots.
          mean_context: positions in their caches; with buckets, any in the right bucket.
          acceptance: of a draft whose predecessors were accepted, as measured so far.
          standing_by: active slots beside them, which a plain step computes and this pass leaves out.
        """
        if self._since is not None:
            return Verdict(True, self._since)
        speedup = self.predicted(batch, mean_context, acceptance, standing_by)
        where = f"{batch + standing_by} active at {mean_context:.0f} positions, acceptance {acceptance:.2f}"
        needed = f"predicted {speedup:.2f} times plain decoding, needed {1 + self.margin:.2f}"
        if speedup < 1.0 + self.margin:
            return Verdict(False, f"off: {where}: {needed}")
        self._since = f"on since {where}: {needed}"
        return Verdict(True, self._since)

    def predicted(self, batch: int, mean_context: float, acceptance: float, standing_by: int = 0) -> float:
        """The predicted speed-up, arguments as above; 0 where no compiled pass has room for a draft."""
        share = batch / (batch + standing_by)  # the others get their tokens in another pass
        if self.buckets is None:
            slots = batch + standing_by
            rows = batch * (self.chain + 1)
            return share * self.roofline.speedup(slots, mean_context, self.chain, acceptance, rows)
        slots = self.buckets.batch_for(batch + standing_by)
        context = self.buckets.cache_for(math.ceil(mean_context))
        chain, rows, attended = 0, 0, 0
        for size, nodes in self.buckets.passes(slots):  # the smallest with room, else the one with the most
            room = min(nodes, size // batch - 1, self.chain)
            if room > chain:
                chain, rows, attended = room, size, slots * (nodes + 1)
        if not chain:
            return 0.0
        return share * self.roofline.speedup(slots, context, chain, acceptance, rows, attended)
