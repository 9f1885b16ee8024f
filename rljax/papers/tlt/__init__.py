"""TLT (FastRL): which strategy drafts, by a bandit; and a head for it that idle workers train.

Section 5.2, Algorithm 1, the Bucketed-Epsilon-Greedy selector (BEG-MAB):

    group the strategies by the tokens that they verify: S_1 (the most) .. S_m
    map group S_i to the batch sizes from threshold t_i on                         `arms.py`
    before a step: V = the strategies of the present batch size                    `bandit.py`
        with probability epsilon any of V, else the one with the largest median of its last w rewards
    after it: reward = (accepted drafts + batch) / seconds

Section 4.2, the spot trainer. A worker is BUSY, IDLE or TRAINING.

    once enough workers are idle, the first of them leads a session, and updates the head; the others
        prepare features of ended responses for it, or train on others (`joiners`)     `spot.py`
    when the leader is needed, or the rollout ends, it is halted at once; another idle worker goes on
        with the head that was saved last                                              `spot_worker.py`
    the newest head, the mean of those that have joined, is every worker's, with its
        next weights                                                                   `spot_driver.py`

The EAGLE head itself is in `drafters/eagle`, and the pool of compiled programs is the engine's (section 5.1).
"""

import itertools
from typing import Literal

from pydantic import Field, field_validator

from rljax.config.cluster_keys import ClusterKeys
from rljax.config.section import Buckets, Count, CountOrOff, Rule, Section, both
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


class SpotConfig(Section):
    """Training an EAGLE head, or a small model, on workers that have nothing to decode (TLT, section 4.2)."""

    idle: CountOrOff = Field(
        0,
        description="Number of workers without requests from which the first of them trains the head and the"
        " others prepare features for it; 0 never does, and the training process trains it behind each"
        " rollout. Set 1 where rollouts end with workers idle for long and drafts pay.",
    )
    joiners: Literal["prepare", "train"] = Field(
        "prepare",
        description="What idle workers behind the first do: prepare features for it, or train, too, each on"
        " responses of its own, by which more updates fit into a rollout; the results are averaged. Set train"
        " with a small model, which needs no features, or where many workers are idle for long.",
    )
    save_every: Count = Field(
        4,
        description="Updates of the head between two times that it is saved, beside training. Lower it to"
        " lose less where workers are lost; raise it where the head is large and the network slow.",
    )


class SpotKeys(ClusterKeys):
    """Keys of training in idle time."""

    spot: SpotConfig = Field(
        SpotConfig(),
        description="Training the drafter in idle time. Set spot.idle with an EAGLE head, or a small model"
        " with slices, whose drafts pay, and several workers.",
    )


SPOT_RULES = (
    Rule(
        ("cluster.spot.idle", "cluster.workers"),
        lambda idle, workers: workers and idle >= workers,
        "cluster.spot.idle: {0} of {1} workers are never idle within a rollout; set fewer, or more"
        " cluster.workers",
    ),
)
SPOT_WITH_WORKERS = (
    Rule(
        ("cluster.spot.idle", "rollout.max_staleness"),
        both,
        "cluster.spot.idle: with rollout.max_staleness no rollout ends, so workers are seldom idle; set 0",
    ),
)
