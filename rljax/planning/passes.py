"""The work of a forward pass: the one count behind plans, which have the shards of a run, and simulations,
which have the shape of a policy.

    FLOPs   2 rows products + rows keys attention
    bytes   weights + positions cached + rows logits
"""

import dataclasses

from rljax.models.config import ModelConfig
from rljax.planning.hardware import Work


@dataclasses.dataclass(frozen=True)
class PassWork:
    """What a device computes and reads in a pass.

    Attributes:
      products: elements of the matrices that every row is multiplied with.
      weights: bytes of weights that are read.
      cached: bytes of keys and values of a position.
      attention: FLOPs of a row's attention to a key, of all layers.
      logits: bytes of a row's logits, written and read in float32.
    """

    products: float
    weights: float
    cached: float
    attention: float
    logits: float

    def __call__(self, rows: float, positions: float, keys: float = 0.0) -> Work:
        """Returns the work of a pass without its collectives.

        Args:
          rows: tokens that are computed.
          positions: positions of caches that are read, of all slots.
          keys: positions that a row attends to.
        """
        flops = rows * (2.0 * self.products + keys * self.attention)
        return Work(flops, self.weights + positions * self.cached + rows * self.logits)


def attention_flops(model: ModelConfig) -> float:
    """Returns the FLOPs of a row's attention to a key: two products in each layer."""
    return 4.0 * model.num_heads * model.head_dim * model.num_layers


def logit_bytes(model: ModelConfig) -> float:
    """Returns the bytes of a row's logits, written and read in float32."""
    return 2 * 4.0 * model.vocab_size


def pass_work(model: ModelConfig) -> PassWork:
    """Returns the work of a decode pass of a whole policy in bfloat16. Of an input embedding that is not the
    LM head a pass reads a row a token, which is not counted; nor are biases and norms.
    """
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * (queries + kv) + 3 * model.mlp_size)
    products = model.num_layers * layer + model.vocab_size * model.hidden_size
    cached = 2 * 2.0 * model.num_layers * kv
    return PassWork(products, 2.0 * products, cached, attention_flops(model), logit_bytes(model))
