"""Names for weights: who keeps something that was made with some must know them again."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from rljax.models.transformer import Params
from rljax.numerics.rows import tree_cast


def weights_digest(params: Params) -> str:
    """Names the weights: the same for the same bits under the same names."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def base_digest(params: Params) -> str:
    """Names the base of an adapter: the digest of its weights rounded to bfloat16, since the same base may be
    held in float32 or bfloat16.
    """
    return weights_digest(tree_cast(params, jnp.bfloat16))
