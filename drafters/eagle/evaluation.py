"""The acceptance of a head's drafts on held-out rollouts (TLT, Table 6, Figure 16).

Computed from features, without decoding: at every start in a response the head drafts `depth` tokens deep
along the sampled tokens, from its own outputs as in drafting. Each of its distributions q is compared with
the policy's p: sum_v min(p, q) is the probability that speculative sampling accepts the token, if it has
accepted those before. Under shared noise it is that of drafting what was sampled (`losses.coupled_at`).
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from drafters.eagle.data import HeadSequence, pack
from drafters.eagle.model import Head, HeadConfig
from drafters.eagle.objective import HeadTraining
from drafters.eagle.states import States
from drafters.eagle.training import head_loss
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The acceptance of chains of drafts.

    Attributes:
      accept_length: tokens that a verifying pass yields on average, the policy's own included.
      by_position: chance that the token at each depth is accepted, if those before it were.
      coupled_length: as `accept_length`, under shared noise.
      coupled: chance that the drafts up to each depth are all accepted, under shared noise.
      agreement: share of starts at which the policy's likeliest token is the head's too, at each depth.
      starts: number of starts counted.
    """

    accept_length: float
    by_position: tuple[float, ...]
    coupled_length: float
    coupled: tuple[float, ...]
    agreement: tuple[float, ...]
    starts: int


_measure = jax.jit(lambda head, training, batch: head_loss(head, training, batch)[1], static_argnums=1)


def evaluate_head(
    params: Params,
    config: HeadConfig,
    shared: Params,
    sequences: Iterable[States],
    rope: Array,
    numerics: Numerics,
    depth: int,
    pack_length: int,
    rows: int = 4,
    sampling: SamplingParams | None = None,
) -> Acceptance:
    """What the head's drafts are worth on sequences with their states; batches weigh by their starts.

    Args:
      params: the head's.
      config: its shape.
      shared: the policy's embeddings and LM head.
      sequences: from `StateReader.read`, of the same policy.
      rope: float32 [at least pack_length + depth - 1, 2, D/2].
      numerics: see `Numerics`.
      depth: drafted tokens.
      pack_length, rows: size of the batches.
      sampling: the sampling distribution; None for temperature 1 without filters.
    """
    # No loss is asked for: only its metrics.
    training = HeadTraining(steps=depth, cross_entropy_weight=0.0, sampling=sampling)
    head = Head(params, shared, jnp.asarray(rope), config, numerics)
    held = [HeadSequence(*sequence, step=0) for sequence in sequences]
    results: list[dict[str, np.ndarray]] = [
        jax.device_get(_measure(head, training, jax.tree.map(jnp.asarray, batch)))
        for batch in pack(held, pack_length).batches(rows)
    ]
    starts = np.asarray([float(result["starts"]) for result in results])
    if not starts.sum():
        raise ValueError("sequences: none has a response to draft")

    def mean(name: str) -> float:
        return float(np.average([float(result[name]) for result in results], weights=starts))

    def by_depth(name: str) -> tuple[float, ...]:
        return tuple(mean(f"{name}/{step}") for step in range(1, depth + 1))

    return Acceptance(
        accept_length=mean("accept_length"),
        by_position=by_depth("acceptance"),
        coupled_length=mean("coupled_length"),
        coupled=by_depth("coupled"),
        agreement=by_depth("agreement"),
        starts=int(starts.sum()),
    )


def describe(acceptance: Acceptance) -> str:
    """Returns one line for the user."""
    positions = " ".join(f"{share:.2f}" for share in acceptance.by_position)
    return (
        f"accept length {acceptance.accept_length:.2f}, acceptance by position {positions};"
        f" under shared noise {acceptance.coupled_length:.2f}"
    )
