"""Names for weights: who keeps something that was made with some must know them again."""

import hashlib

import jax
import numpy as np

from rljax.models.transformer import Params


def weights_digest(params: Params) -> str:
    """Names the weights: the same for the same bits under the same names."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
