"""Training EAGLE heads: `python scripts/bench_drafters.py [--config FILE] [key=value ...]`.

Trains heads for the config's policy, after its warm start, on the policy's rollouts. `docs/eagle.md` explains
the rows.
"""

import sys
from collections.abc import Sequence

from drafter_benchmarks.adaptation import adaptation_rows
from drafter_benchmarks.in_loop import in_loop_rows
from drafter_benchmarks.objectives import objective_rows
from drafter_benchmarks.packing import packing_rows
from drafter_benchmarks.rl import rl_rows
from drafter_benchmarks.saving import saving_rows
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.config import ExperimentConfig, load_config
from rljax.errors import UserError
from rljax.training.drafter_warm_up import WarmUp
from training_benchmarks.policies import POLICIES

_CONFIG = "configs/quickstart.yaml"
_UPDATES, _LEARNING_RATE = 8, 5e-4  # a rate at which a few updates matter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _benchmark(None, WarmUp()).parser()
    parser.add_argument("--config", default=_CONFIG, metavar="FILE", help=f"the policy (default: {_CONFIG})")
    parser.add_argument("--slices", type=int, default=60, help="of each head's training (default: 60)")
    parser.add_argument(
        "--updates", type=int, default=_UPDATES, help="of the policy, in rl and loop (default: 8)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=_LEARNING_RATE, help="of these (default: 5e-4)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    try:
        if arguments.slices < 1:
            raise UserError(f"--slices: {arguments.slices} is not at least 1")
        if arguments.updates < 1 or arguments.learning_rate <= 0:
            raise UserError("--updates is at least 1, and --learning-rate above 0")
        config = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = WarmUp("eagle", steps=arguments.slices, slices_per_round=max(arguments.slices // 2, 1))
    return _benchmark(config, settings, arguments.updates, arguments.learning_rate).run(arguments)


def _benchmark(
    config: ExperimentConfig | None,
    settings: WarmUp,
    updates: int = _UPDATES,
    learning_rate: float = _LEARNING_RATE,
) -> Benchmark:
    return Benchmark(
        "drafters",
        __doc__.splitlines()[0],
        (
            Measurement("packing", "against padding", lambda: packing_rows(config, settings, 5)),
            *(
                Measurement("checkpoint", name, lambda name=name: saving_rows(name, POLICIES[name], 7))
                for name in ("2M", "100M")
            ),
            Measurement(
                "adaptation",
                "heads and policies",
                lambda: adaptation_rows(config, settings, rl_steps=4, learning_rate=5e-4, slices=15),
                disturbed=False,
            ),
            Measurement(
                "rl",
                "beside a policy that is trained",
                lambda: rl_rows(config, settings, updates, learning_rate, slices=15),
                disturbed=False,
            ),
            Measurement(
                "loop",
                "a head trained in the loop",
                lambda: in_loop_rows(config, settings, updates, learning_rate, slices=15),
                disturbed=False,
            ),
            Measurement(
                "training", "what an objective is worth", lambda: objective_rows(config, settings, 3)
            ),
        ),
        packages=("numpy", "safetensors"),
    )


if __name__ == "__main__":
    sys.exit(main())
