"""SRT: the bubbles in which it samples ahead, and what drafts from the cache bring."""

from collections.abc import Mapping, Sequence

from rljax.simulation.figures.figure import Figure, Published
from rljax.simulation.scenario import Scenario

_CENTRAL = (
    "model=qwen2.5-1.5b",
    "tensor=1",
    "workers=4",
    "router=static",
    "samples=5",
    "prompts_per_step=205",
    "prompts=410",
    "longest=2048",
    "mean=380",
    "sigma=0.7",
    "within=0.3",
    "steps=6",
    "warm_up=2",
    "train=11",
    "weights=0",
    "base_ms=12",
)
_TREE = "drafters=tree:0.65:0.2:0"


def _bubbles(overrides: Sequence[str]) -> Mapping[str, float]:
    plain = Scenario().replaced(overrides)
    cluster = plain.run()
    steps = cluster.steps[plain.warm_up :]
    rollout = sum(step.end - step.begin for step in steps) / len(steps)
    tree = Scenario().replaced([*overrides, _TREE])
    drafted = tree.run().steps[tree.warm_up :]
    faster = sum(step.end - step.begin for step in drafted) / len(drafted)
    # Passes that all slots of the first batch would have had until the rollout's end.
    slots = plain.prompts_per_step * plain.samples / plain.workers
    passes = (
        sum(place.worker.passes for place in cluster._places.values()) / plain.workers / len(cluster.steps)
    )
    tokens = sum(step.tokens for step in cluster.steps) / len(cluster.steps) / plain.workers
    return {
        "rollout, seconds": rollout,
        "rollout with drafts from the cache, speed-up": rollout / faster,
        "step, speed-up": (rollout + plain.train) / (faster + plain.train),
        "rollout's share of the step": rollout / (rollout + plain.train),
        "share of slots free while a worker decodes": 1 - tokens / (passes * slots),
    }


FIGURES = (
    Figure(
        "srt-bubbles",
        "SRT, table 1 (GRPO) and Fig. 2",
        {
            "rollout, seconds": Published(31.8, "table 1"),
            "rollout with drafts from the cache, speed-up": Published(2.06, "table 1: 31.8 s to 15.4 s"),
            "step, speed-up": Published(1.64, "table 1: 42.9 s to 26.2 s"),
            "rollout's share of the step": Published(0.74, "table 1"),
        },
        {
            "policy": "Qwen2.5 1.5B",
            "responses to a prompt": "5 (table 2)",
            "step, rollout": "42.9 s and 31.8 s; so updates take 11 s",
            "tokens": "83.8 us a token: 31.8 s are 380,000 tokens",
        },
        {
            "4 H100, 1,025 responses, mean 380": "of 83.8 us a token; device and batch are not published",
            "base_ms=12": "what a pass of vLLM takes besides: it is not published",
            "tree:0.65:0.2:0": "acceptance of drafts from the cache, at no cost; a table of it is not"
            " published",
        },
        _bubbles,
        _CENTRAL,
        (
            ("sigma 0.9", ("sigma=0.9",)),
            ("sigma 0.5", ("sigma=0.5",)),
            ("quicker passes", ("base_ms=6",)),
            ("longer ones", ("longest=4096",)),
            ("twice the responses", ("prompts_per_step=410", "prompts=820")),
        ),
        ("The free slots are what `speculation.run_ahead_below` fills; the paper gives no number for them.",),
    ),
)
