"""Bytes that a policy's forward pass reads and operations that it computes, from its shape alone.

These are the counts behind the roofline (`roofline.py`): W_T, W_D, kappa_theoretical, C_dense and C_attn of
EfficientRollout, section 3.2 and appendix E.3.
"""

import dataclasses

from drafters.quantized import PROJECTIONS, WeightFormat
from rljax.engine.kv_cache import cache_dtype
from rljax.models.config import ModelConfig
from rljax.models.transformer import num_params, param_shapes
from rljax.numerics.rows import Numerics

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
