"""SpecActor: a drafter that suits the rollout, further ones for its stragglers, and drafts made ahead.

Section 4.1, drafting on devices of its own. While the policy verifies a window of w drafts, the drafter goes
on with the next window; a rejection wastes 2w - 1 drafts at most.

    Algorithm 1: of all device counts and windows, the one with the most tokens per second
        decoupled    tau_w / max(w D, V_w)                                         `plan` in `planner.py`
    Algorithm 2: every thousand tokens, for each request that is accepted less than the mean,
        the better of coupled and decoupled with a window of its own               `reconfigure`
    the manager that asks them                                                     `decoupled.py`

Section 4.2, best-of-N.

    draft ladder: speed-up by drafter, acceptance and batch, from measured times   `ladder.py`
    a rollout begins with the drafter that is highest on the ladder at its acceptance so far
    Algorithm 3: as responses end, the requests with the lowest acceptance get all other drafters,
        and the longest accepted prefix counts                                     `races.py`, `best_of_n.py`

Races between workers, where each has a drafter of its own, are in `racing.py`.
"""

from typing import Annotated

from pydantic import Field, model_validator

from rljax.config.cluster_keys import ClusterKeys
from rljax.config.section import CountOrOff, Rule, Section, both
from rljax.config.speculation_keys import SpeculationKeys
from rljax.speculation.window_costs import Mode


class DecoupledConfig(Section):
    """Decoupled speculation: a small model or an EAGLE head on devices of its own drafts the next window
    while the policy verifies the last one (SpecActor, section 4.1)."""

    window: CountOrOff = Field(
        0,
        description="Most tokens that are drafted ahead at a time, 2 or more; 0 is off. Set it where devices"
        " are left over and the drafts are nearly always accepted; a rejection throws up to"
        " twice as many drafts away.",
    )
    devices: Annotated[tuple[CountOrOff, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Numbers of the devices that draft, from 0 on; several split the model by its heads."
        " null is the first behind those of the mesh. Set others that are nearer to the policy's, or 0 to"
        " share the policy's, without drafting and verifying at once.",
    )
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)] = Field(
        ("plain", "coupled", "decoupled"),
        description="Ways to decode that SpecActor's Algorithm 1 chooses among, by measured times and"
        " acceptance. Set decoupled alone to measure what choosing is worth.",
    )

    @model_validator(mode="after")
    def _check(self) -> "DecoupledConfig":
        if self.window == 1:
            raise ValueError(
                "speculation.decoupled.window: 1 leaves nothing to draft ahead; set 0 (off) or at least 2"
            )
        return self


class SpecActorKeys(SpeculationKeys):
    """Keys of drafting ahead; `choice: ladder` has none of its own."""

    decoupled: DecoupledConfig = DecoupledConfig()

    @property
    def policy(self) -> str:
        return "decoupled" if self.decoupled.window else super().policy

    @property
    def drafting_devices(self) -> int:
        devices = self.decoupled.devices
        return (1 if devices is None else len(devices)) if self.decoupled.window else 0

    @property
    def by_one_clock(self) -> tuple[str, ...]:
        return ("speculation.decoupled.window",) if self.decoupled.window else ()


_WINDOW = "speculation.decoupled.window"
RULES = (
    Rule(
        (_WINDOW, "speculation.drafter"),
        lambda window, drafter: window and drafter not in ("small_model", "eagle"),
        f"{_WINDOW}: needs speculation.drafter: small_model or eagle; others draft on the policy's devices,"
        " or take no time that could be hidden",
    ),
    Rule(
        (_WINDOW, "speculation.choice", "speculation.others"),
        lambda window, choice, others: window and others and choice != "ladder",
        f"{_WINDOW}: with speculation.others needs speculation.choice: ladder, which chooses the drafter; got"
        " {1}",
    ),
    Rule(
        (_WINDOW, "speculation.choice", "speculation.others"),
        lambda window, choice, others: window and not others and choice != "expected",
        f"{_WINDOW}: is chosen by SpecActor's Algorithm 1; leave out speculation.choice: {{1}}",
    ),
    Rule(
        (_WINDOW, "speculation.overlap", "speculation.run_ahead_below"),
        lambda window, overlap, below: window and (overlap or below),
        f"{_WINDOW}: is not possible with speculation.overlap or run_ahead_below; leave these out",
    ),
    Rule(
        (_WINDOW, "speculation.max_drafts"),
        lambda window, most: window > most,
        f"{_WINDOW}: {{0}} is more than speculation.max_drafts {{1}}",
    ),
    Rule(
        (_WINDOW, "engine.verification"),
        lambda window, verification: window and verification != "coupled",
        f"{_WINDOW}: needs engine.verification: coupled, got {{1}}; drafts ahead are sampled with the"
        " requests' noise",
    ),
    Rule(
        (_WINDOW, "rollout.repetition_penalty", "rollout.frequency_penalty", "rollout.presence_penalty"),
        lambda window, *penalties: window and penalties != (1.0, 0.0, 0.0),
        f"{_WINDOW}: needs rollout.repetition_penalty 1.0, frequency_penalty 0 and presence_penalty 0; the"
        " drafter's devices do not have the policy's counts of tokens",
    ),
)


class RaceKeys(ClusterKeys):
    """Keys of races between workers."""

    race: CountOrOff = Field(
        0,
        description="Responses of which a worker without work decodes copies, with a drafter that they have"
        " not had (SpecActor's best-of-N); the longest copy counts. 0 never copies any. Set a few"
        " where there are several drafters and rollouts end with few responses for long.",
    )


RACES_WITH_WORKERS = (
    Rule(
        ("cluster.race", "speculation.kinds"),
        lambda race, kinds: race and len(kinds) < 2,
        "cluster.race: copies need another drafter; set speculation.others, too",
    ),
    Rule(
        ("cluster.race", "tools"),
        both,
        "cluster.race: a copy would call tools again, which may answer otherwise; set 0",
    ),
)
