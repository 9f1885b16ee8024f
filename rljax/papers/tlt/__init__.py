"""TLT (FastRL): which strategy drafts, by a bandit that learns from measured rewards alone.

Section 5.2, Algorithm 1, the Bucketed-Epsilon-Greedy selector (BEG-MAB):

    group the strategies by the tokens that they verify: S_1 (the most) .. S_m
    map group S_i to the batch sizes from threshold t_i on                         `arms.py`
    before a step: V = the strategies of the present batch size                    `bandit.py`
        with probability epsilon any of V, else the one with the largest median of its last w rewards
    after it: reward = (accepted drafts + batch) / seconds

The EAGLE head that TLT trains on idle devices is in `drafters/eagle`, its training on idle workers in
`rljax/papers/tlt/spot.py` (section 4.2), and the pool of compiled programs is the engine's (section 5.1).
"""

import itertools

from pydantic import Field, field_validator

from rljax.config.section import Buckets, Count, Rule
from rljax.config.speculation_keys import SpeculationKeys


class TltKeys(SpeculationKeys):
    """Keys of `choice: bandit`."""

    batch_thresholds: Buckets = Field(
        (),
        description="With choice: bandit, the numbers of running responses, ascending, from which on each"
        " group of strategies is an arm, as in TLT's Algorithm 1: strategies that verify equally many nodes"
        " are a group, and the one with the most nodes has the first range. Empty lays the groups of every"
        " drafter along the batch buckets, with their neighbours. Set it where good sizes are known.",
    )
    epsilon: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability that the bandit tries a random strategy. Raise it where conditions change"
        " often.",
    )
    window: Count = Field(
        32, description="Number of uses of a strategy that the bandit remembers. Lower it to adapt faster."
    )

    @field_validator("batch_thresholds")
    @classmethod
    def _check_ascending(cls, thresholds: tuple[int, ...]) -> tuple[int, ...]:
        if any(larger <= smaller for smaller, larger in itertools.pairwise(thresholds)):
            raise ValueError(f"speculation.batch_thresholds: should ascend, got {list(thresholds)}")
        return thresholds


RULES = (
    Rule(
        ("speculation.batch_thresholds", "speculation.choice", "speculation.strategies"),
        lambda thresholds, choice, strategies: thresholds and (choice != "bandit" or not strategies),
        "speculation.batch_thresholds: needs speculation.choice: bandit, and speculation.strategies",
    ),
    Rule(
        ("speculation.batch_thresholds", "speculation.max_batch"),
        lambda thresholds, most: thresholds and thresholds[-1] > most and thresholds[-1],
        "speculation.batch_thresholds: from {found} responses on nothing is drafted, since"
        " speculation.max_batch is {1}; raise that, or leave the threshold and its strategies out",
    ),
)
