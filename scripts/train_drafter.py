"""Train a draft head before RL: `python scripts/train_drafter.py --config FILE --output DIR`."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from drafters.eagle.arguments import BlockArguments
from drafters.eagle.objective import VARIANTS, WEIGHTS, head_training
from rljax.accelerators import skip_absent
from rljax.config import load_config
from rljax.errors import Interrupted, UserError

# By argument of `speculation.args`, where the same may be said for a run.
_OBJECTIVE = {
    "unrolled_steps": "times the head is applied, from the second one on to its previous output (1, 3, 7)",
    **WEIGHTS,
}


def _within(number: type, least: float, most: float) -> Callable[[str], Any]:
    """Returns what reads a number above and below these."""

    def read(text: str) -> Any:
        if not least < (value := number(text)) < most:
            below = "" if most == math.inf else f" and below {most}"
            raise argparse.ArgumentTypeError(f"{text} is not above {least}{below}")
        return value

    return read


_COUNT, _RATE = _within(int, 0, math.inf), _within(float, 0, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_drafter.py",
        description="Train a draft head on the rollouts of a config's policy. Started again, it resumes.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the experiment, a YAML file")
    output = "where the head will be; DIR.partial is for resuming, and goes in the end"
    parser.add_argument("--output", required=True, metavar="DIR", help=output)
    block = {
        name: BlockArguments.model_fields[f"block_{name}"].default for name in ("size", "depth", "width")
    }
    variant = "eagle is the fastest to train, eagle3 reads three layers, block drafts in one pass"
    for option, kind, default, what in (
        ("--variant", VARIANTS, "eagle3", variant),
        ("--block-size", _COUNT, block["size"], "of a block head: tokens of a draft"),
        ("--block-depth", _COUNT, block["depth"], "of a block head: layers"),
        ("--block-width", _COUNT, block["width"], "of a block head: of the correction"),
        ("--steps", _COUNT, 400, "updates in all"),
        ("--slices-per-round", _COUNT, 100, "updates before new rollouts"),
        ("--learning-rate", _RATE, 1e-3, "for toys; 3e-5 for policies of billions of weights"),
        ("--heldout", _COUNT, 64, "held-out problems to measure acceptance on"),
        ("--engine", ("sglang", "vllm"), "sglang", "who shall load it"),
    ):
        taken = {"type": kind} if callable(kind) else {"choices": kind}
        parser.add_argument(option, **taken, default=default, help=f"{what} (default: {default})")
    parser.add_argument(
        "--draft-vocabulary",
        type=_COUNT,
        metavar="N",
        help="tokens that the head drafts, those most frequent in the first rollouts, by its own LM head;"
        " fewer cost less (default: the policy's)",
    )
    losses = parser.add_argument_group("objective", "losses by weight; the defaults are those of the variant")
    for name, help_ in _OBJECTIVE.items():
        number = int if name == "unrolled_steps" else float
        losses.add_argument(f"--{name.replace('_', '-')}", type=number, metavar="N", help=help_)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a key of the config, such as seed=1"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        skip_absent()
        # JAX takes seconds to import, so the config is checked first.
        from drafters.eagle.model import BlockShape
        from rljax.training.drafter_warm_up import WarmUp, warm_up

        objective, block = {name: getattr(arguments, name) for name in _OBJECTIVE}, None
        if arguments.variant == "block":
            block = BlockShape(arguments.block_size, arguments.block_depth, arguments.block_width)
            objective["unrolled_steps"] = objective["unrolled_steps"] or block.size
        own = "variant", "draft_vocabulary", "steps", "slices_per_round", "learning_rate", "heldout", "engine"
        given = {name: getattr(arguments, name) for name in own}
        training = head_training(arguments.variant, **objective)
        settings = WarmUp(block=block, training=training, **given)
        warm_up(config, settings, arguments.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupted:
        print(f"{interrupted}; the same command continues {arguments.output}", file=sys.stderr)
        return 128 + interrupted.signal
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes {arguments.output}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
