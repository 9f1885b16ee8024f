"""When does speculation pay on this machine: `python scripts/calibrate.py --config FILE [key=value ...]`.

Times forward passes of the config's policy, fits the roofline to two thirds of them, compares it with the
rest, and keeps its constants for runs of the same policy on the same device: see `docs/paper-managers.md`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rljax.config import SpeculationConfig, load_config
from rljax.config.wing import part
from rljax.errors import UserError, exit_status
from rollout_benchmarks.variants import open_run

_OUTPUT = Path("benchmarks/results/calibration.json")


@exit_status("interrupted")
def main(argv: Sequence[str] | None = None) -> None:
    """Measures the constants unless they are cached; prints and writes the results."""
    parser = argparse.ArgumentParser(
        prog="calibrate.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    again = "measure although speculation.calibration_dir has constants"
    parser.add_argument("--config", required=True, metavar="FILE", help="the experiment, a YAML file")
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="FILE", help=f"default: {_OUTPUT}")
    parser.add_argument("--rounds", type=int, default=3, help="sweeps over all shapes")
    parser.add_argument("--repeats", type=int, default=3, help="passes of a shape in a sweep")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set keys of the config")
    arguments = parser.parse_intermixed_args(argv)
    config, calibrate_run = load_config(arguments.config, arguments.overrides), part("calibrate_run")
    for name in ("rounds", "repeats"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name}: {getattr(arguments, name)} is too few; use at least 1")
    # Times depend neither on the values of the weights, so none are trained first, nor on the drafter; and
    # `choice: roofline` would need the constants that are measured here.
    bare = config.model_copy(update={"warm_start": None, "speculation": SpeculationConfig()})
    given = arguments.rounds, arguments.repeats, arguments.output, arguments.again
    with open_run(bare) as (run, progress):
        calibrate_run(run, config, *given, progress.message)


if __name__ == "__main__":
    sys.exit(main())
