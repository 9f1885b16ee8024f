"""Drafters of one policy: `python scripts/bench_drafters.py [--config FILE] [key=value ...]`.

Trains heads for the config's policy, SmolLM2 by default, on its rollouts, and lets the policy draft in fewer
bits. `docs/eagle.md` and `docs/drafters.md` explain the rows. The policy's updates have the config's learning
rate.
"""

import dataclasses
import sys
from argparse import Namespace
from pathlib import Path

from bench_training import saving_rows
from drafter_benchmarks.heads import LOSSES, acceptance_rows, objective_rows, packing_rows
from drafter_benchmarks.rl import rl_rows
from drafter_benchmarks.self_draft import BITS, QUANTIZERS, self_draft_rows, shared_prefix_rows
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.errors import UserError
from rljax.training.drafter_warm_up import WarmUp
from workloads import REAL, REAL_CONFIG

_SLICES = 15  # of a head, in a step
_DRAFTED = 4096  # tokens that the heads of losses draft


def _plan(arguments: Namespace) -> list[Measurement]:
    config, slices = arguments.config, arguments.slices
    for name in ("slices", "updates"):
        if (value := getattr(arguments, name)) <= 0:
            raise UserError(f"--{name}: {value} is not above 0")
    settings = WarmUp("eagle", steps=slices, slices_per_round=max(slices // 2, 1))
    losses = dataclasses.replace(settings, draft_vocabulary=_DRAFTED, depth=4)
    losses = config, losses, 3, arguments.losses.split(","), arguments.work
    rl = config, settings, arguments.updates, _SLICES
    return [
        Measurement("packing", "against padding", packing_rows, (config, settings, 5)),
        *(Measurement("checkpoint", name, saving_rows, (name, 7)) for name in (REAL, "2M", "100M")),
        Measurement("rl", "beside a policy that is trained", rl_rows, rl, disturbed=False),
        Measurement("losses", "what drafts are worth by loss", acceptance_rows, losses, disturbed=False),
        Measurement("bits", "the policy drafts", self_draft_rows, (config, BITS, 48, 5), disturbed=False),
        *(
            Measurement("quantizers", f"in {bits} bits", self_draft_rows, (config, each, 48, 5), False)
            for bits, each in QUANTIZERS.items()
        ),
        Measurement("shared_prefixes", "samples that agree", shared_prefix_rows, (config, 3), False),
        Measurement("training", "what an objective is worth", objective_rows, (config, settings, 3)),
    ]


BENCHMARK = Benchmark(
    "drafters",
    __doc__,
    _plan,
    packages=("numpy", "safetensors"),
    config=REAL_CONFIG,
    options={
        "--slices": {"default": 60, "help": "of each head's training"},
        "--losses": {"default": ",".join(LOSSES), "help": "in losses, the baseline first"},
        "--work": {
            "default": Path("cache/losses"),
            "help": "where losses keeps rollouts and results, so that the same command goes on",
        },
        "--updates": {"default": 8, "help": "of the policy, in rl"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
