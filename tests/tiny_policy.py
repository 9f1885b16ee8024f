"""A policy of one layer, and requests to it, for tests of how rollouts are decoded."""

import jax
import numpy as np

from rljax.engine.buckets import Buckets
from rljax.models import transformer
from rljax.models.config import ModelConfig
from rljax.requests import Request
from rljax.sampling.noise import request_key
from rljax.speculation.pass_times import PassTimes

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


class FixedTimes(PassTimes):
    """Pass times that depend on the rows only, whatever is measured; 0 rows are a plain step."""

    def __init__(self, by_rows, draft=None):
        super().__init__()
        self.by_rows, self.draft_seconds = by_rows, draft

    def plain(self, batch, length):
        return self.by_rows[0]

    def verify(self, batch, length, rows):
        return self.by_rows[rows]

    def draft(self, batch, length, drafter, strategy=None):
        return self.draft_seconds

    def _add(self, seconds, *key):
        assert seconds > 0


class CheapTimes(PassTimes):
    """Pass times by which drafting and verifying take less than a plain step."""

    def has_plain(self, batch, length):
        return True

    def plain(self, batch, length):
        return 1.0

    def verify(self, batch, length, rows):
        return 1e-3

    def draft(self, batch, length, drafter, strategy=None):
        return 1e-3

    def _add(self, seconds, *key):
        assert seconds > 0
