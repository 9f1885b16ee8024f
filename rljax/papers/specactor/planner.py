"""Which kind of speculation, with how many devices and which window (SpecActor, Algorithms 1 and 2).

Times are affine in the batch b: a drafter takes D(b) = b D' + alpha a token, a verifier V_w(b) = b V'_w +
beta_w a window of w drafts. The verifier's figures are given for w + 1 rows a request, which it computes.

    decoupled   drafter and verifier work at once: max(w D, V_w), and tau_w tokens of it count
    coupled     one after the other: w D + V_w, and the tokens of a chain, with the one that verification adds
    plain       one token a pass, V_0

The paper's algorithm knows the first alone, and so can choose what is slower than not to speculate at all;
here all three compete. A speed is that of one request, in tokens per second: all of the batch have it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from rljax.speculation.draft_length import window_seconds, window_tokens
from rljax.speculation.window_costs import Affine, Mode

Verifier = Callable[[int], Affine]
"""Window -> seconds of a pass that verifies so many drafts a request; 0 for plain decoding."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured, or computed from a roofline.

    Attributes:
      drafters: seconds of a drafted token of every request, by number of devices.
      verifiers: seconds of a pass, by number of devices.
    """

    drafters: Mapping[int, Affine]
    verifiers: Mapping[int, Verifier]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to decode.

    Attributes:
      mode: kind of speculation.
      window: drafts between two verifications; 0 if it is plain.
      drafter_devices: devices of a drafter; 0 where the verifier's draft too.
      verifier_devices: devices of a verifier.
      batch: requests of a verifier.
      speed: tokens per second of a request.
    """

    mode: Mode
    window: int
    drafter_devices: int
    verifier_devices: int
    batch: int
    speed: float


def speed(
    mode: Mode, drafter: Affine, verifier: Verifier, batch: float, window: int, acceptance: float
) -> float:
    """Tokens per second of a request; without drafts, the window is 0."""
    decoupled = mode == "decoupled"
    seconds = window_seconds(window * drafter(batch), verifier(window)(batch), decoupled)
    return window_tokens(acceptance, window, decoupled) / seconds


def largest_window(drafter: Affine, verifier: Verifier) -> int:
    """w_max of Algorithm 1: drafting a longer window takes longer than verifying it, at any batch."""
    verify = verifier(1)
    ratios = [
        top / bottom
        for top, bottom in zip(dataclasses.astuple(verify), dataclasses.astuple(drafter), strict=True)
        if bottom
    ]
    return max([math.ceil(ratio) for ratio in ratios], default=1) or 1


def plan(
    requests: int,
    devices: int,
    profile: Profile,
    acceptance: float,
    most_window: int = 64,
    modes: Sequence[Mode] = ("plain", "coupled", "decoupled"),
) -> Choice:
    """Returns the fastest way to decode a rollout (Algorithm 1, with coupled and plain among the choices).

    Args:
      requests: requests of the rollout.
      devices: devices for drafters and verifiers together.
      profile: times.
      acceptance: probability that a draft is accepted behind accepted ones.
      most_window: largest window, for drafters that cost next to nothing.
      modes: kinds to choose among.

    Raises:
      ValueError: nothing of it fits the devices.
    """
    choices = []
    for size, verifier in profile.verifiers.items():
        if size > devices:
            continue
        batch = math.ceil(size * requests / devices)
        if "plain" in modes:
            plain = speed("plain", Affine(0.0, 0.0), verifier, batch, 0, acceptance)
            choices.append(Choice("plain", 0, 0, size, batch, plain))
        for drafting, drafter in profile.drafters.items():
            if drafting > size:
                continue
            windows = range(1, min(largest_window(drafter, verifier), most_window) + 1)
            more = math.ceil((drafting + size) * requests / devices)
            ways = [("coupled", 0, batch)] + [("decoupled", drafting, more)] * (drafting + size <= devices)
            for (mode, own, share), window in itertools.product(ways, windows):
                if mode in modes:
                    rate = speed(mode, drafter, verifier, share, window, acceptance)
                    choices.append(Choice(mode, window, own, size, share, rate))
    if not choices:
        sizes = ", ".join(map(str, profile.verifiers))
        raise ValueError(f"nothing of {', '.join(modes)} fits {devices} devices with verifiers of {sizes}")
    return max(choices, key=lambda choice: choice.speed)


def reconfigure(
    acceptances: Mapping[int, float], planned: Choice, profile: Profile, most_window: int = 64
) -> dict[int, Choice]:
    """Returns how to go on with the requests that are accepted less than the mean (Algorithm 2): the better
    of coupled and decoupled at a batch of one, by request, or plain where that is better than both.

    Args:
      acceptances: measured acceptance by request, of all that are in progress.
      planned: what `plan` chose for all.
      profile: times.
      most_window: largest window.
    """
    if not acceptances:
        return {}
    mean = sum(acceptances.values()) / len(acceptances)
    verifier = profile.verifiers[planned.verifier_devices]
    drafting = planned.drafter_devices or min(profile.drafters)
    drafter = profile.drafters[drafting]
    windows = range(1, min(largest_window(drafter, verifier), most_window) + 1)
    size, chosen = planned.verifier_devices, {}
    ways = [("coupled", 0)] + [("decoupled", drafting)] * (planned.mode == "decoupled")
    for request, acceptance in acceptances.items():
        if acceptance >= mean:
            continue
        choices = [Choice("plain", 0, 0, size, 1, speed("plain", drafter, verifier, 1, 0, acceptance))]
        for window, (mode, own) in itertools.product(windows, ways):
            rate = speed(mode, drafter, verifier, 1, window, acceptance)
            choices.append(Choice(mode, window, own, size, 1, rate))
        chosen[request] = max(choices, key=lambda choice: choice.speed)
    return chosen
