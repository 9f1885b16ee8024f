"""RhymeRL: lengths of the previous epoch decide who decodes what (HistoPipe).

Section 6, for responses whose lengths stay alike from epoch to epoch:

    rank prompts by the median length of their last responses, and cut them into groups    `histopipe.py`
    odd steps give the groups to workers ascending, even steps descending, so that a
        worker's long step follows a short one; steps overlap, one version behind          (section 6.2)
    a response among the last share alpha of its group, and beyond beta times the group's
        longest, goes on on a worker of longer ones, or in the next step                   (section 6.3)
    long groups get more workers, so that the groups' times rise linearly                  `two_tiers.py`
                                                                                           (section 6.4)

What is known of earlier rollouts is in `history.py`. RhymeRL's drafts, HistoSpec, are a drafter
(`drafters/histospec.py`), and its history workers (sections 4.2 and 5.3) are the drafter's
(`drafters/history_index.py`). Up to which batch a worker drafts is looked up by acceptance (section 5.4,
`cutoff.py`).
"""

from typing import Literal

from pydantic import Field

from rljax.config.cluster_keys import ClusterKeys
from rljax.config.section import Count, Rule, both


class RhymeKeys(ClusterKeys):
    """Keys of HistoPipe."""

    pipe: Literal["off", "ranked", "two_tiers"] = Field(
        "off",
        description="Who decodes which prompts (RhymeRL's HistoPipe): ranked by the lengths of their last"
        " responses, ascending in odd steps and descending in even ones, so that a worker's long step follows"
        " a short one; two_tiers gives long ones more workers. Needs rollout.staleness: 1, or into_next_step."
        " Set it where prompts come again in many epochs and their lengths stay alike.",
    )
    pipe_groups: Count | None = Field(
        None,
        description="Number of ranking groups; null for one a worker. Set fewer than workers for two_tiers,"
        " such as half of them.",
    )
    pipe_min_workers: Count = Field(
        1,
        description="Fewest workers of a ranking group with two_tiers (RhymeRL's MIN_WKS). Raise it where"
        " the short groups' batches do not fit one worker.",
    )
    pipe_max_workers: Count | None = Field(
        None,
        description="Most workers of a ranking group with two_tiers (RhymeRL's MAX_WKS); null is four times"
        " an even share. Lower it where more workers no longer shorten a group, raise it where a few long"
        " responses decide how long a step takes.",
    )
    migration: bool = Field(
        False,
        description="Whether responses that become much longer than their ranking group was go on on workers"
        " that decode longer ones (RhymeRL, section 6.3). Set it with pipe.",
    )
    into_next_step: bool = Field(
        False,
        description="Whether groups that wait for nothing but responses that became much longer than expected"
        " are left to the next step, and these go on under its weights (RhymeRL's migration into the next"
        " step). Needs rollout.max_staleness: 2. Set it where one response in a batch holds up every step;"
        " timing decides which, and schedule.jsonl repeats it.",
    )


def _too_many(fewest: int, groups: int, workers: int) -> int | None:
    """Returns the number of ranking groups if workers do not suffice for the fewest that each must have."""
    return groups if workers and fewest * groups > workers else None


RULES = (
    Rule(
        ("cluster.migration", "cluster.pipe"),
        lambda migration, pipe: migration and pipe == "off",
        "cluster.migration: moves what outgrows its group; set cluster.pipe",
    ),
    Rule(
        ("cluster.pipe_groups", "cluster.pipe"),
        lambda groups, pipe: groups is not None and pipe == "off",
        "cluster.pipe_groups: are those of cluster.pipe, which is off",
    ),
    *(
        Rule(
            (f"cluster.{key}", "cluster.pipe"),
            lambda workers, pipe, unset=unset: workers != unset and pipe != "two_tiers",
            f"cluster.{key}: sizes the groups of cluster.pipe: two_tiers; set that",
        )
        for key, unset in (("pipe_min_workers", 1), ("pipe_max_workers", None))
    ),
    Rule(
        ("cluster.pipe_min_workers", "cluster.pipe_groups", "cluster.workers"),
        lambda fewest, groups, workers: _too_many(fewest, min(groups or workers, workers), workers),
        "cluster.pipe_min_workers: {0} for each of {found} ranking groups are more than cluster.workers: {2};"
        " lower it, or cluster.pipe_groups",
    ),
    Rule(
        ("cluster.pipe_max_workers", "cluster.pipe_min_workers"),
        lambda most, fewest: most is not None and most < fewest,
        "cluster.pipe_max_workers: {0} is less than cluster.pipe_min_workers: {1}; raise it",
    ),
)
CUTOFF_RULES = (
    Rule(
        ("speculation.choice", "speculation.drafter", "speculation.others"),
        lambda choice, drafter, others: choice == "cutoff" and (drafter is None or others),
        "speculation.choice: cutoff has a table of one drafter; set speculation.drafter, and no"
        " speculation.others",
    ),
)
WITH_WORKERS = (
    Rule(
        ("cluster.pipe", "rollout.staleness", "cluster.into_next_step"),
        lambda pipe, staleness, into_next: pipe != "off" and not (staleness or into_next),
        "cluster.pipe: every step would wait for the worker with the longest responses; set rollout.staleness"
        " to 1, or cluster.into_next_step",
    ),
    Rule(
        ("cluster.migration", "rollout.max_staleness"),
        both,
        "cluster.migration: a response that goes on under newer weights stays with its worker; set false:"
        " cluster.into_next_step moves outliers into the next step",
    ),
    Rule(
        ("cluster.into_next_step", "rollout.max_staleness"),
        lambda into_next, staleness: into_next and staleness != 2,
        "cluster.into_next_step: prompts are handed out one step ahead and wait for one more; set"
        " rollout.max_staleness to 2",
    ),
)
