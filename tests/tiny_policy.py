"""A policy of one layer, and requests to it, for tests of how rollouts are decoded."""

import jax
import numpy as np

from rljax.engine.buckets import Buckets
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.rollout.records import Request
from rljax.sampling.noise import request_key

VOCAB, EOS, SLOTS = 64, 1, 4
CONFIG = ModelConfig("qwen3", VOCAB, 64, 1, 4, 2, 64, 128, tie_embeddings=True, qk_norm=True)
BUCKETS = Buckets((2, 4), (64, 128), (8, 16, 32), 7)


def make_params(seed=0):
    """Weights twice as large as fresh ones, so that some tokens are much likelier than others."""
    stir = lambda leaf: leaf * 2 if leaf.ndim > 1 else leaf  # noqa: E731
    return jax.tree.map(stir, transformer.init_params(CONFIG, seed))


def make_requests(lengths=(3, 20, 64, 8, 1, 30), limits=(60, 40, 64, 7, 1, 98)):
    """Prompts in groups of three, more than there are slots; the longest fill the largest cache."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, VOCAB, length).tolist()) for length in lengths]
    return [
        Request(prompt, request_key(0, 0, 0, i, sample), limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for sample in range(3)
    ]


class FixedTimes:
    """In the place of pass times: such that depend on the rows only."""

    def __init__(self, by_rows):
        self.by_rows = by_rows

    def __getitem__(self, shape):
        return self.by_rows[shape[2]]

    def add(self, shape, seconds):
        assert seconds > 0


class CheapTimes:
    """In the place of pass times: whatever is drafted and verified takes less than a plain step."""

    def __getitem__(self, shape):
        return 1.0 if shape[2] == 0 else 1e-3

    def __contains__(self, shape):
        return True

    def add(self, shape, seconds):
        assert seconds > 0
