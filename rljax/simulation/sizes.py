"""How many devices verify, how many draft, and with which window: SpecActor's Algorithm 1 for a scenario.

The paper runs it once before a training run, on times that were profiled beforehand (section 4.1). Here they
are the scenario's: seconds of passes by the number of devices of a worker, affine in its batch by those of
one request and of all that are its share; and those of the first drafter, on one device. A request has its
prompt and half of a mean response in the cache.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rljax.config.wing import part
from rljax.errors import ConfigError
from rljax.simulation.scenario import Scenario
from rljax.speculation.window_costs import Affine, Mode

_MODES: tuple[Mode, ...] = ("plain", "coupled", "decoupled")


def chosen_sizes(scenario: Scenario, verifiers: Sequence[int]) -> dict[str, Any]:
    """Returns the fastest `Choice` of `rljax/papers/specactor/planner.py` by mode; of a mode for which the
    devices are too few, none.

    Args:
      scenario: policy, device, drafters, windows, requests of a step, and devices: workers * tensor.
      verifiers: numbers of devices that a worker may have.

    Raises:
      ConfigError: there is no drafter, or no number of devices fits.
    """
    drafters = list(scenario.drafters_of().values())
    devices = scenario.workers * scenario.tensor
    if not drafters:
        raise ConfigError("--sizes: nothing drafts; set drafters")
    if not verifiers or not 1 <= min(verifiers) <= devices:
        raise ConfigError(f"--sizes: {list(verifiers)} should have numbers from 1 to {devices} devices")
    requests = scenario.prompts_per_step * scenario.samples
    cached = scenario.prompt_tokens + scenario.mean / 2

    def seconds_by_window(size: int) -> Any:
        costs = dataclasses.replace(scenario, tensor=size).pass_costs()
        share = max(math.ceil(size * requests / devices), 2)

        def seconds(batch: int, window: int) -> float:
            return costs.fixed(batch * (window + 1)) + batch * cached * costs.cached

        def affine(window: int) -> Affine:
            each = (seconds(share, window) - seconds(1, window)) / (share - 1)
            return Affine(each, seconds(1, window) - each)

        return affine

    profile = part("Profile")(
        {1: Affine(drafters[0].each, drafters[0].base)},
        {size: seconds_by_window(size) for size in verifiers},
    )
    widest = max(map(int, scenario.windows.split(",")))
    found = {}
    for mode in _MODES:
        try:
            found[mode] = part("plan")(
                requests, devices, profile, drafters[0].acceptance, widest, modes=(mode,)
            )
        except ValueError:  # a drafter next to a verifier of all devices
            continue
    return found


def sizes_table(found: dict[str, Any]) -> str:
    """Returns a line a mode, the fastest one first."""
    order = sorted(found.values(), key=lambda choice: -choice.speed)
    lines = [
        f"{each.mode:<10} {each.speed:8.1f} tokens/s a request   {each.verifier_devices} devices verify"
        f" {each.batch} requests"
        + (f", {each.drafter_devices} draft" if each.drafter_devices else "")
        + (f", windows of {each.window}" if each.window else "")
        for each in order
    ]
    return "\n".join(lines)
