"""SRT (ReSpec): speculative rollouts from trees of earlier responses, and run-ahead on idle workers.

Section 3: what has nothing to decode in the tail of a rollout generates prompts that come up soon.

    idle slots of a process that decodes decode requests
        of the next step, with their noise                  `run_ahead.py`, `plans.py`
    that step proposes the tokens as drafts                 `aligned.py`
    workers without requests: the coordinator gives them
        such requests, under the weights that they have;
        what they have sampled is every worker's draft,
        with its next weights                               `ahead.py`

The tree of responses is the drafter `srt` (`drafters/suffix.py`).
"""

from pydantic import Field

from rljax.config.section import CountOrOff, Rule, both, first_alone
from rljax.config.speculation_keys import SpeculationKeys


class SrtKeys(SpeculationKeys):
    """Keys of run-ahead."""

    run_ahead_below: CountOrOff = Field(
        0,
        description="Number of running responses from which on idle slots sample requests of the next step"
        " (with algorithm.dynamic_sampling, of a further round where one is likely),"
        " with the noise of these requests, as drafts only; 0 is off. With cluster.workers any number lets"
        " workers without requests do so. Set it where prompts are"
        " new and updates small. The batch shrinks later where these drafts save more than that costs.",
    )
    run_ahead_share: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Largest share of a rollout's time for inserting such requests into slots. Lower it"
        " when it lengthens the tail of rollouts.",
    )

    @property
    def fills_idle_slots(self) -> str:
        return _BELOW if self.run_ahead_below else ""


_BELOW = "speculation.run_ahead_below"
OF_STEPS = {"run_ahead_below": "there is no next step to sample ahead for"}
RULES = (
    Rule(
        (_BELOW, "speculation.drafter"),
        first_alone,
        f"{_BELOW}: needs a drafter to fall back to; set speculation.drafter",
    ),
    Rule(
        (_BELOW, "engine.verification"),
        lambda below, verification: below and verification != "coupled",
        f"{_BELOW}: needs engine.verification: coupled, got {{1}}; the other rules want drafts that know"
        " nothing of the noise",
    ),
    Rule(
        ("rollout.max_staleness", _BELOW),
        both,
        f"rollout.max_staleness: is not possible with {_BELOW}; set that to 0",
    ),
    Rule(
        ("agents", _BELOW),
        lambda agents, below: agents is not None and below,
        f"{_BELOW}: is not supported with agents: its requests are unknown; set 0",
    ),
)

WITH_WORKERS = (
    *(
        Rule(
            (_BELOW, key),
            lambda below, value, used=used: below and used(value),
            f"{_BELOW}: is not supported with cluster.workers and {key}: {reason}; set 0",
        )
        for key, used, reason in (
            ("algorithm.dynamic_sampling", bool, "a further round has the weights that workers have already"),
            ("distributed", lambda distributed: distributed.is_wanted(), "one process knows the workers"),
        )
    ),
    Rule(
        ("cluster.spot.idle", _BELOW),
        both,
        f"cluster.spot.idle: an idle worker trains, or samples ahead; set it or {_BELOW} to 0",
    ),
)
