"""SRT (ReSpec): speculative rollouts from trees of earlier responses, and run-ahead on idle workers.

Section 3: what has nothing to decode in the tail of a rollout generates prompts that come up soon.

    idle slots of a process that decodes                   `rljax/rollout/sources/sampling_ahead.py`
    workers without requests: the coordinator gives them
        requests of the next step, with their noise, under
        the weights that they have; what they have sampled
        is every worker's draft, with its next weights      `ahead.py`

The tree of responses is the drafter `srt` (`drafters/suffix.py`).
"""

from rljax.config.section import Rule, both

WITH_WORKERS = (
    *(
        Rule(
            ("speculation.run_ahead_below", key),
            lambda below, value, used=used: below and used(value),
            f"speculation.run_ahead_below: is not supported with cluster.workers and {key}: {reason}; set 0",
        )
        for key, used, reason in (
            ("algorithm.dynamic_sampling", bool, "a further round has the weights that workers have already"),
            ("distributed", lambda distributed: distributed.is_wanted(), "one process knows the workers"),
        )
    ),
    Rule(
        ("cluster.spot.idle", "speculation.run_ahead_below"),
        both,
        "cluster.spot.idle: an idle worker trains, or samples ahead; set it or speculation.run_ahead_below"
        " to 0",
    ),
)
