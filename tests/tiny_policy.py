"""A policy of one layer, and requests to it, for tests of how rollouts are decoded."""

import dataclasses
import functools
import itertools

import numpy as np

from drafters.base import Outcome
from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.config import ModelConfig
from rljax.numerics.rows import Numerics
from rljax.requests import Request
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.speculation.managers.expected import ExpectedManager
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.pass_times import PassTimes
from tests.engines import scaled_params, stored_pool

VOCAB, EOS, SLOTS = 64, 1, 4
CONFIG = ModelConfig("qwen3", VOCAB, 64, 1, 4, 2, 64, 128, tie_embeddings=True, qk_norm=True)
BUCKETS = Buckets((2, 4), (64, 128), (8, 16, 32), 7)

HEAD = {"pack_length": 64, "depths": [3], "slices": 2, "unrolled_steps": 1}  # an EAGLE head of few programs
ALL_ROWS = [32, 16, 0, 8, 32, 32, 0, 16, 8]


def make_params(seed=0):
    """Weights twice as large as fresh ones, so that some tokens are much likelier than others."""
    return scaled_params(CONFIG, 2, seed=seed)


def make_engine(sampling=None, buckets=BUCKETS, eos=(EOS,), steps=16, numerics=None, pool=None, **more):
    """An engine of the policy, with a pool of its own unless one is given."""
    pool = stored_pool() if pool is None else pool
    return DecodeEngine(
        CONFIG, numerics or Numerics(), sampling or SamplingParams(), buckets, eos, steps, pool, **more
    )


def make_requests(lengths=(3, 20, 64, 8, 1, 30), limits=(60, 40, 64, 7, 1, 98)):
    """Prompts in groups of three, more than there are slots; the longest fill the largest cache."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, VOCAB, length).tolist()) for length in lengths]
    return [
        Request(prompt, request_key(0, 0, 0, i, sample), limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for sample in range(3)
    ]


def assert_same(completions, expected):
    assert len(completions) == len(expected)
    for mine, other in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(mine.response_ids, other.response_ids)
        np.testing.assert_array_equal(mine.logprobs, other.logprobs)
        assert mine.finish_reason == other.finish_reason


def spell(ids):
    """Letters, so that one stop string can be spelled by several tokens."""
    return "".join("abcd"[i % 4] for i in ids)


def outcomes(requests, completions):
    return [
        Outcome(request.prompt_ids, completion.response_ids, 0.0)
        for request, completion in zip(requests, completions, strict=True)
    ]


class FixedTimes(PassTimes):
    """Pass times that depend on the rows only, whatever is measured; 0 rows are a plain step."""

    def __init__(self, by_rows, draft=None):
        super().__init__()
        self.by_rows, self.draft_seconds = by_rows, draft

    def plain_is_old(self, batch, length):
        return False

    def plain(self, batch, length):
        return self.by_rows[0]

    def verify(self, batch, length, rows):
        return self.by_rows[rows]

    def draft(self, batch, length, drafter, strategy=None):
        return self.draft_seconds

    def _add(self, seconds, *key):
        assert seconds > 0


class CheapTimes(FixedTimes):
    """Pass times by which drafting and verifying take less than a plain step."""

    def __init__(self):
        super().__init__({0: 1.0}, draft=1e-3)

    def has_plain(self, batch, length):
        return True

    def verify(self, batch, length, rows):
        return 1e-3


def strategy_choice(choice, *strategies, make=None, **keys):
    """The manager of a policy's name, with these strategies and keys of speculation, unchecked."""
    given = [dataclasses.asdict(strategy) for strategy in strategies]
    config = SpeculationConfig.model_construct(choice=choice, strategies=given, **keys)
    return StrategyChoice(config, make=make)


def by_rows(choose_rows, **keys):
    """The default manager, with another choice of the rows of a pass."""
    make = functools.partial(ExpectedManager, choose_rows=choose_rows)
    return strategy_choice("expected", make=make, **keys)


class FavouriteRows(CheapTimes):
    """Rows of passes in turn, whatever is expected of them; 0 is a plain step."""

    def __init__(self, rows):
        super().__init__()
        self.rows = itertools.cycle(rows)

    def choose(self, candidates, buckets, times, batch, length):
        fitting = [rows for rows, _ in BUCKETS.passes(batch) if rows > len(candidates.current)]
        rows = next(self.rows)
        return min(rows, fitting[-1]) and max(min(rows, fitting[-1]), fitting[0])

    @property
    def choice(self):
        return by_rows(self.choose)
