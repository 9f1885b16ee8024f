"""Cases of a measurement: arguments, implementations, and the least cost of an operation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rljax.kernels.switch import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class PolicyShape:
    """Sizes of a real policy.

    Attributes:
      name: name of the model.
      hidden, mlp, vocab: d, the SwiGLU layer's width, V.
      heads, kv_heads, head_dim: H, Hk, D.
    """

    name: str
    hidden: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int


POLICIES = (
    PolicyShape("Qwen2.5-7B", 3584, 18_944, 152_064, 28, 4, 128),
    PolicyShape("Llama-3.1-8B", 4096, 14_336, 128_256, 32, 8, 128),
    PolicyShape("Qwen2.5-1.5B", 1536, 8960, 151_936, 12, 2, 128),
    PolicyShape("Qwen2.5-0.5B", 896, 4864, 151_936, 14, 2, 64),
)
"""The first is measured first: a measurement may be cut short."""
TINY = PolicyShape("tiny", 256, 512, 2048, 4, 2, 64)
"""For a look at a CPU, where kernels are interpreted."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of an operation.

    Attributes:
      name: name in the rows, such as "Qwen2.5-7B, 16 slots of 4096, 16 nodes".
      sizes: sizes of the policy that the operation's default depends on (`rljax.kernels.switch.call`).
      make: returns one set of random arguments on the device. Several sets take turns in the measurement, so
        that the device's cache is as cold as in a real step.
      functions: implementations and their baselines, by name. Pure; compiled with the arguments of `make`.
      bytes: smallest number of bytes to move between memory and processor, each read or write counted once.
      flops: additions and multiplications in matrix products.
      donated: indices of donated arguments, such as a cache that is written in place.
    """

    name: str
    sizes: tuple[int, ...]
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    functions: Mapping[str, Callable[..., Any]]
    bytes: int
    flops: int
    donated: tuple[int, ...] = ()


def by_implementation(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """`function(*args, implementation=name)` by the name of every implementation."""

    def one(name: str) -> Callable[..., Any]:
        return lambda *args: function(*args, implementation=name)

    return {name: one(name) for name in IMPLEMENTATIONS}
