"""EfficientRollout's roofline: predicted seconds of plain steps, verifying passes and draft steps.

EfficientRollout, section 3.2 (Eq. 2) and appendix E.3. A pass takes as long as the slower of reading memory
and computing, and a little more for every slot. Bytes and operations are counted from the policy's shape
(`PolicyCosts`: W_T, W_D, kappa_theoretical, C_dense and C_attn); how long each takes is fitted to measured
passes, once for a policy and a device (`fit.py`, `scripts/calibrate.py`). Four constants are not in the
paper, because a CPU needs them (`docs/paper-managers.md` says why): how much of reading and computing
overlaps, ceilings of their own for attention and for products of integers, and a fixed cost of a verifying
pass.
"""

import dataclasses
from typing import Any, Literal

from drafters.quantized import PROJECTIONS, WeightFormat
from rljax.engine.kv_cache import cache_dtype
from rljax.models.config import ModelConfig
from rljax.models.transformer import num_params, param_shapes
from rljax.numerics.rows import Numerics
from rljax.speculation.draft_length import expected_tokens

_SCALE_BYTES, _ZERO_BYTES = 4, 1  # bytes per group of quantized weights


@dataclasses.dataclass(frozen=True)
class PolicyCosts:
    """Counts for one policy and its quantized self-drafter.

    Attributes:
      weight_bytes: bytes of weights that a pass reads, however many tokens it computes.
      draft_bytes: bytes of weights that a draft step reads.
      kv_bytes: bytes of keys and values of one position of one slot.
      projection_flops: operations of a token's products with the weights that the drafter has quantized.
      head_flops: operations of a token's product with the LM head, which the drafter shares.
      attention_flops: operations of a token's attention to one position.
      integer_drafts: True if the drafter's products are of integers, at another speed than the policy's.
    """

    weight_bytes: float
    draft_bytes: float
    kv_bytes: float
    projection_flops: float
    head_flops: float
    attention_flops: float
    integer_drafts: bool

    @property
    def dense_flops(self) -> float:
        """Operations of a token's products with weights."""
        return self.projection_flops + self.head_flops


def policy_costs(config: ModelConfig, numerics: Numerics, fmt: WeightFormat) -> PolicyCosts:
    """Counts for a policy with the number formats of `numerics`, and a drafter with weights in `fmt`."""
    layer = param_shapes(config)["layers"][0]
    projections = [layer[name] for name in PROJECTIONS]
    quantized = config.num_layers * sum(outputs * inputs for outputs, inputs in projections)
    head = config.vocab_size * config.hidden_size
    # A pass reads only one row a token of an untied input embedding.
    read = num_params(config) - (0 if config.tie_embeddings else head)
    size = numerics.dtype.itemsize
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return PolicyCosts(
        weight_bytes=size * read,
        draft_bytes=size * (read - quantized)
        + config.num_layers * sum(_quantized_bytes(*shape, fmt) for shape in projections),
        kv_bytes=kept * cache_dtype(numerics).itemsize,
        projection_flops=2 * quantized,
        head_flops=2 * head,
        # A multiply-add for the score and one for the value, of every query head.
        attention_flops=4 * config.num_layers * config.num_heads * config.head_dim,
        integer_drafts=fmt.activations == "int8",
    )


def _quantized_bytes(outputs: int, inputs: int, fmt: WeightFormat) -> int:
    """Bytes of a `QuantizedWeight` [outputs, inputs]."""
    groups = -(-inputs // fmt.group) if fmt.group else 1
    if fmt.bits == 4:
        return outputs * (-(-inputs // 2) + groups * (_SCALE_BYTES + _ZERO_BYTES))
    return outputs * (inputs + groups * _SCALE_BYTES)


Kind = Literal["plain", "verify", "draft"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured forward pass.

    Attributes:
      kind: a plain decode step, a verifying pass, or a step of drafting.
      batch: slots, B.
      context: positions of every slot that attention reads, S. This engine reads whole cache buckets.
      rows: tokens whose products with weights are computed; equal to `batch` except for verifying passes.
      attended: tokens whose attention is computed; for verifying passes a rectangle of slots and nodes.
      seconds: measured time.
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

    Constants are seconds per unit, not units per second, so that a free unit is 0.

    Attributes:
      costs: bytes and operations of the policy and its drafter.
      byte: seconds per byte of the policy's weights; 1 / BW_eff.
      kv_byte: seconds per byte of keys and values; rho / BW_eff.
      flop: seconds per operation of products with weights; 1 / F_eff.
      attention_flop: seconds per operation of attention; equal to `flop` in the paper.
      slot: seconds per slot of a plain step, c_T.
      verified_slot: seconds per slot of a verifying pass, c_V.
      verifying: fixed seconds of a verifying pass; 0 in the paper.
      draft_byte: seconds per byte of the drafter's weights; eta_D / BW_eff.
      draft_flop: seconds per operation of products with them; equal to `flop` unless they are of integers.
      draft_slot: seconds per slot of a draft step, c_D.
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
        """Predicted seconds of a plain decode step, T_p."""
        return self._combined(*self._policy_parts(batch, context, batch, batch)) + self.slot * batch

    def verify_seconds(self, batch: int, context: float, rows: int, attended: int | None = None) -> float:
        """Predicted seconds of a verifying pass, T_V.

        Args:
          batch, context: see `Point`.
          rows: tokens that are computed, the slots' last ones included; in the paper B * (gamma + 1).
          attended: see `Point`; equal to `rows` if left out.
        """
        reading = self._policy_parts(batch, context, rows, rows if attended is None else attended)
        return self._combined(*reading) + self.verified_slot * batch + self.verifying

    def draft_seconds(self, batch: int, context: float) -> float:
        """Predicted seconds of a step of the quantized self-drafter, T_q."""
        costs = self.costs
        memory = costs.draft_bytes * self.draft_byte + costs.kv_bytes * batch * context * self.kv_byte
        computing = costs.projection_flops * self.draft_flop + costs.head_flops * self.flop
        computing += costs.attention_flops * context * self.attention_flop
        return self._combined(memory, batch * computing) + self.draft_slot * batch

    def seconds(self, point: Point) -> float:
        """Predicted seconds of the pass of a point."""
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
        drafting: float | None = None,
    ) -> float:
        """Predicted speed-up of speculation over plain decoding, Eq. 1.

        Args:
          batch, context: see `Point`.
          chain: draft tokens of a slot, gamma.
          acceptance: probability that a draft is accepted, given that its predecessors are.
          rows, attended: tokens of the verifying pass, see `Point`; all drafts of all slots if left out.
          drafting: seconds of drafting the chains; None for those of the quantized self-drafter.
        """
        if drafting is None:
            drafting = chain * self.draft_seconds(batch, context)
        verifying = self.verify_seconds(batch, context, rows or batch * (chain + 1), attended)
        tokens = expected_tokens(acceptance, chain)
        return tokens * self.target_seconds(batch, context) / (drafting + verifying)

    def as_json(self) -> dict[str, Any]:
        """The constants and the counts, as JSON can hold them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Roofline":
        """The inverse of `as_json`; raises TypeError or KeyError for anything else."""
        return cls(**{**content, "costs": PolicyCosts(**content["costs"])})

    def _policy_parts(self, batch: int, context: float, rows: int, attended: int) -> tuple[float, float]:
        """Seconds of reading and of computing, for a pass of the policy."""
        costs = self.costs
        memory = costs.weight_bytes * self.byte + costs.kv_bytes * batch * context * self.kv_byte
        attention = costs.attention_flops * context * attended * self.attention_flop
        return memory, costs.dense_flops * rows * self.flop + attention

    def _combined(self, memory: float, computing: float) -> float:
        """Seconds of both: the longer, and the part of the shorter that is not hidden behind it."""
        return max(memory, computing) + (1.0 - self.overlap) * min(memory, computing)
