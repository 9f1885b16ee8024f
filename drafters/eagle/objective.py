"""The kinds of heads, and the objective of each: its losses, and for how many unrolled steps."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from rljax.errors import ConfigError

if TYPE_CHECKING:
    from rljax.sampling.distribution import SamplingParams

Variant = Literal["eagle", "hass", "eagle3", "block"]
"""What they read and compute: `drafters/eagle/model.py`."""
VARIANTS: tuple[Variant, ...] = ("eagle", "hass", "eagle3", "block")

WEIGHTS = {
    "hidden_weight": "smooth L1 distance of hidden states (1, 1, none)",
    "cross_entropy_weight": "cross entropy with the policy (0.1, 0.1, 1)",
    "reverse_kl_weight": "reverse KL divergence (0)",
    "lk_weight": "minus the logarithm of the acceptance rate (0)",
    "tv_weight": "1 minus the acceptance rate (0)",
    "coupled_weight": "accepted drafts under shared noise, by the chance of agreeing on any token (0)",
    "sampled_weight": "the same, by the chance of drafting the token that was sampled (0)",
}
"""What an objective adds up, by the key of its weight, with the weights of eagle, hass and eagle3."""


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """The objective of a head.

    Attributes:
      steps: number of times that the head is applied, k: 1 is EAGLE, 3 HASS, 7 EAGLE-3; of a block, its
        positions.
      step_decay: step j has weight step_decay^j (EAGLE-3's code: 0.8); but for the last two weights, which
        are of all steps of a draft together.
      hidden_weight: weight of the smooth L1 distance between hidden states; must be 0 for eagle3 and
        block, whose outputs are not hidden states of the policy.
      cross_entropy_weight, reverse_kl_weight, lk_weight, tv_weight: weights of the losses in `losses.py`.
      coupled_weight, sampled_weight: weights of -log of the drafts that are expected to be accepted
        (`losses.accepted_drafts`), by `losses.coupled` or `losses.coupled_at`.
      logit_chunk: number of positions, over all rows, whose logits are in memory at once. Chunks without a
        token to learn from are not computed, so that smaller ones save time where prompts are long.
      sampling: the sampling distribution; None for temperature 1 without filters. Its temperature divides the
        logits of both sides (0 does not). Tokens that it filters are never sampled, in the last two losses.
    """

    steps: int = 1
    step_decay: float = 1.0
    hidden_weight: float = 0.0
    cross_entropy_weight: float = 1.0
    reverse_kl_weight: float = 0.0
    lk_weight: float = 0.0
    tv_weight: float = 0.0
    coupled_weight: float = 0.0
    sampled_weight: float = 0.0
    logit_chunk: int = 1024
    sampling: "SamplingParams | None" = None


def published_training(variant: Variant) -> HeadTraining:
    """Returns the losses and steps of TLT's Figure 7, weighted as in the authors' code; of a block (DFlash,
    with its decay over positions) those of the default size.
    """
    if variant in ("eagle3", "block"):
        return HeadTraining(steps=7 if variant == "eagle3" else 8, step_decay=0.8)
    return HeadTraining(steps=3 if variant == "hass" else 1, hidden_weight=1.0, cross_entropy_weight=0.1)


def head_training(
    variant: Variant, unrolled_steps: int | None = None, **weights: float | None
) -> HeadTraining:
    """Returns `published_training` of a variant, with every argument that is not None in place of its value.

    Args:
      variant: the head's variant.
      unrolled_steps: `HeadTraining.steps`.
      **weights: some of `WEIGHTS`.

    Raises:
      ConfigError: an invalid number, a weight for hidden states that the variant does not predict, or all
        weights 0; the message begins with the argument.
    """
    changed = {name: weight for name, weight in weights.items() if weight is not None}
    for name, weight in changed.items():
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{name}: should be a finite number and not negative, got {weight}")
    training = dataclasses.replace(published_training(variant), **changed)
    if unrolled_steps is not None:
        if unrolled_steps < 1:
            raise ConfigError(f"unrolled_steps: should be at least 1, got {unrolled_steps}")
        training = dataclasses.replace(training, steps=unrolled_steps)
    if variant in ("eagle3", "block") and training.hidden_weight:
        raise ConfigError(
            f"hidden_weight: {variant}'s outputs are no hidden states of the policy; leave it at 0"
        )
    if not any(getattr(training, name) for name in WEIGHTS):
        raise ConfigError("cross_entropy_weight: it and all other weights are 0, so nothing would be learned")
    return training
