"""The objectives of a head: which losses it is trained on, and for how many unrolled steps."""

import dataclasses

from drafters.eagle.variant import Variant
from rljax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """The objective of a head.

    Attributes:
      steps: number of times that the head is applied, k: 1 is EAGLE, 3 HASS, 7 EAGLE-3.
      step_decay: step j has weight step_decay^j (EAGLE-3's code: 0.8).
      hidden_weight: weight of the smooth L1 distance between hidden states; must be 0 for eagle3, whose
        outputs are not hidden states of the policy.
      cross_entropy_weight, reverse_kl_weight, lk_weight: weights of the losses in `losses.py`.
      logit_chunk: number of positions, over all rows, whose logits are in memory at once.
    """

    steps: int = 1
    step_decay: float = 1.0
    hidden_weight: float = 0.0
    cross_entropy_weight: float = 1.0
    reverse_kl_weight: float = 0.0
    lk_weight: float = 0.0
    logit_chunk: int = 1024


def published_training(variant: Variant) -> HeadTraining:
    """Returns the losses and steps of TLT's Figure 7, weighted as in the authors' code."""
    if variant == "eagle3":
        return HeadTraining(steps=7, step_decay=0.8)
    return HeadTraining(steps=3 if variant == "hass" else 1, hidden_weight=1.0, cross_entropy_weight=0.1)


def head_training(
    variant: Variant,
    unrolled_steps: int | None = None,
    hidden_weight: float | None = None,
    cross_entropy_weight: float | None = None,
    reverse_kl_weight: float | None = None,
    lk_weight: float | None = None,
) -> HeadTraining:
    """Returns `published_training` of a variant, with every argument that is not None in place of its value.

    Args:
      variant: the head's variant.
      unrolled_steps: `HeadTraining.steps`.
      hidden_weight, cross_entropy_weight, reverse_kl_weight, lk_weight: as in `HeadTraining`.

    Raises:
      ConfigError: an invalid number, a weight for hidden states that the variant does not predict, or all
        weights 0; the message begins with the argument.
    """
    weights = {
        "hidden_weight": hidden_weight,
        "cross_entropy_weight": cross_entropy_weight,
        "reverse_kl_weight": reverse_kl_weight,
        "lk_weight": lk_weight,
    }
    changed = {name: weight for name, weight in weights.items() if weight is not None}
    for name, weight in changed.items():
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{name}: should be a finite number and not negative, got {weight}")
    if unrolled_steps is not None:
        if unrolled_steps < 1:
            raise ConfigError(f"unrolled_steps: should be at least 1, got {unrolled_steps}")
        changed["steps"] = unrolled_steps
    training = dataclasses.replace(published_training(variant), **changed)
    if variant == "eagle3" and training.hidden_weight:
        raise ConfigError("hidden_weight: eagle3's outputs are no hidden states of the policy; leave it at 0")
    if not any(getattr(training, name) for name in weights):
        raise ConfigError("cross_entropy_weight: it and all other weights are 0, so nothing would be learned")
    return training
