"""The quantized self-drafter: the policy with its weights rounded anew at the start of every step.

EfficientRollout, section 3.1 and appendix C: the projections of attention and MLP are rounded to 4 bits in
groups of 128 inputs, with a scale and a zero each, or to 8 bits; embeddings, norms, biases and the LM head
are the policy's, the same buffers. So the drafter follows the policy without any training, and drafts on its
KV cache (`rljax/engine/self_drafting.py`).

8-bit weights are symmetric with one scale for each output: the scale then stands outside the sum over inputs,
which can be computed in integers (`rljax/kernels/quantized_product`). At 8 bits finer groups gain little.

A quantizer is a function `(weight [out, in], WeightFormat, Implementation) -> QuantizedWeight` and a line in
`QUANTIZERS`. `rtn` rounds to nearest (`rljax/kernels/round_to_nearest`); `clipped` looks for the range of
each group that leaves the least squared error, as AWQ's clipping step does (Lin et al., 2024), but without
activations. Scales that follow activations (appendix C.4) were measured and left out: `docs/drafters.md`,
"Acceptance by bits".
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from drafters.arguments import QuantizedArguments
from drafters.base import Drafter
from rljax import target
from rljax.errors import ConfigError, known_names
from rljax.kernels.round_to_nearest import base, round_to_nearest
from rljax.kernels.round_to_nearest.grid import grid, nearest
from rljax.kernels.tuned import has_kernel
from rljax.models.config import ModelConfig
from rljax.models.sharding import param_shardings
from rljax.models.transformer import Params
from rljax.numerics.blocked_weights import whole
from rljax.numerics.kernel_choice import Implementation, KernelChoice, require_xla
from rljax.numerics.quantized import Activations, QuantizedWeight, WeightLayout
from rljax.sharding import MESH_AXES

if TYPE_CHECKING:
    from rljax.engine.engine import DecodeEngine

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The quantized weights of every layer."""

_SHRINKS = tuple(1.0 - 0.05 * step for step in range(11))  # shares of a group's range that `clipped` tries


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The storage format of weights.

    Attributes:
      bits: 4 (with a zero in each group) or 8 (symmetric).
      group: inputs that share a scale, the last group of a row possibly fewer; 0 for the whole row.
      activations: see `QuantizedWeight`.
    """

    bits: int = 4
    group: int = 128
    activations: Activations = "float"

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise ConfigError(f"speculation.args.bits: {self.bits} is not supported; use 4 or 8")
        if self.group < 0:
            raise ConfigError(f"speculation.args.group: should not be negative, got {self.group}")
        if self.activations == "int8" and (self.bits, self.group) != (8, 0):
            raise ConfigError(
                "speculation.args.activations: int8 needs one scale for each row of weights: bits 8, group 0"
            )


Quantizer = Callable[[Array, WeightFormat, Implementation], QuantizedWeight]


def default_format(bits: int) -> WeightFormat:
    """Returns the paper's format, 4 bits in groups of 128 or 8 bits by output, in the form that is fast on
    this device.
    """
    if bits != 8:
        return WeightFormat(bits, 128)
    return WeightFormat(8, 0, "int8" if target.platform() == "cpu" else "float")


# -- quantizers --------------------------------------------------------------------------------------------


def rtn(weight: Array, fmt: WeightFormat, implementation: Implementation = None) -> QuantizedWeight:
    """Rounds to nearest: the grid of a group spans its weights, and 0."""
    return _quantized(round_to_nearest(weight, fmt.bits, fmt.group, implementation), weight, fmt)


def clipped(weight: Array, fmt: WeightFormat, implementation: Implementation = None) -> QuantizedWeight:
    """Rounds to nearest on the grid with the least squared error, among grids that span a part of the range.

    Raises:
      Refused: `implementation` names only kernels, and there are none.
    """
    require_xla(
        "round_to_nearest",
        implementation,
        "only rounds to nearest, and speculation.args.quantizer is clipped",
    )
    groups = base.grouped(weight, fmt.group)
    low, high = base.ranges(groups)
    best_error = jnp.full(low.shape, jnp.inf, jnp.float32)
    best = grid(low, high, fmt.bits)
    for shrink in _SHRINKS:
        tried = grid(shrink * low, shrink * high, fmt.bits)
        scale, inverse, zero = (each[..., None] for each in tried)
        restored = (nearest(groups, inverse, zero, fmt.bits) - zero) * scale
        error = jnp.sum(jnp.square(restored - groups), axis=-1)
        better = error < best_error
        best_error = jnp.where(better, error, best_error)
        best = tuple(jnp.where(better, new, old) for new, old in zip(tried, best, strict=True))
    return _quantized(base.on_grid(groups, *best, weight.shape[1], fmt.bits), weight, fmt)


def _quantized(parts: tuple[Array, Array, Array | None], weight: Array, fmt: WeightFormat) -> QuantizedWeight:
    inputs = weight.shape[1]
    return QuantizedWeight(*parts, fmt.bits, inputs, fmt.group or inputs, fmt.activations)


QUANTIZERS: dict[str, Quantizer] = {"rtn": rtn, "clipped": clipped}


# -- the policy --------------------------------------------------------------------------------------------


class QuantizedPolicy:
    """The policy's weights for its self-drafter, refreshed when the policy changes.

    Args:
      fmt: format of the projections.
      quantizer: a name in `QUANTIZERS`.
      kernels: implementations of rounding to nearest and of products with the weights.
      layouts: on a mesh, the layout of every projection; each device quantizes its parts.

    Attributes:
      format: see the arguments.
      params: the drafter's params; None before the first refresh, and after `release`.
      seconds: time of the last refresh without compilation.
      bytes: size of the quantized projections, all that the drafter needs beside the policy.
      read_bytes: size of all weights that a draft step reads, the shared LM head included.
    """

    def __init__(
        self,
        fmt: WeightFormat,
        quantizer: str = "rtn",
        kernels: KernelChoice | None = None,
        layouts: dict[str, WeightLayout] | None = None,
    ) -> None:
        if quantizer not in QUANTIZERS:
            known = known_names(quantizer, QUANTIZERS)
            raise ConfigError(f"speculation.args.quantizer: unknown quantizer {quantizer!r}; {known}")
        self.format = fmt
        # A program for a layer serves all of them. The weights of the step before are not read: they are
        # passed so that the new ones may take their place in memory.
        self._quantize_layer = jax.jit(
            functools.partial(
                _quantize_layer, QUANTIZERS[quantizer], fmt, kernels or KernelChoice(), layouts or {}
            ),
            donate_argnums=1,
            keep_unused=True,
        )
        self._compiled: dict[tuple, Callable[..., dict[str, QuantizedWeight]]] = {}  # see `compile`
        self.params: Params | None = None
        self._source: Params | None = None  # the policy's weights that are followed
        self._layers: list[dict[str, QuantizedWeight]] = []  # whose memory the next ones take over
        self.seconds = 0.0
        self.bytes = 0
        self.read_bytes = 0

    def follow(self, params: Params) -> None:
        """The policy has these weights now, in the engine's form; they are quantized when they are needed."""
        if params is not self._source:
            self.release()
            self._source = params

    @property
    def pending_seconds(self) -> float:
        return self.seconds if self.params is None else 0.0

    def weights(self) -> Params:
        """Returns the drafter's weights for the policy that is followed, quantized at the first call: a
        rollout without such drafts pays nothing.
        """
        return self.refresh(self._source) if self.params is None else self.params

    def compile(self, params: Params) -> Params:
        """Compiles what `refresh` needs; another thread may draft meanwhile.

        Args:
          params: the policy's weights in the engine's form, or their shapes, on one device.

        Returns:
          The shapes of the drafter's weights.
        """
        layers, programs = [], {}
        for layer in params["layers"]:
            projections = {name: whole(layer[name]) for name in PROJECTIONS}
            quantized = jax.eval_shape(self._quantize_layer, projections, None)
            for before in (None, quantized):
                key = _shapes_of(projections, before)
                if key not in programs:
                    programs[key] = self._quantize_layer.lower(projections, before).compile()
            layers.append(layer | quantized)
        self._compiled = programs
        return params | {"layers": layers}

    def _quantize(
        self, projections: dict[str, Array], before: dict[str, QuantizedWeight] | None
    ) -> dict[str, QuantizedWeight]:
        program = self._compiled.get(_shapes_of(projections, before), self._quantize_layer)
        return program(projections, before)

    def refresh(self, params: Params) -> Params:
        """Returns the drafter's weights for the policy `params`, which are in the engine's form. Consumes the
        weights of the previous refresh.
        """
        projections = [{name: whole(layer[name]) for name in PROJECTIONS} for layer in params["layers"]]
        if not self._layers:  # both programs are compiled before the clock starts
            jax.block_until_ready(self._quantize(projections[0], self._quantize(projections[0], None)))
        start = time.perf_counter()
        old, self._layers = self._layers or [None] * len(projections), []
        for own, before in zip(projections, old, strict=True):
            self._layers.append(self._quantize(own, before))
        layers = [layer | quantized for layer, quantized in zip(params["layers"], self._layers, strict=True)]
        self.params = jax.block_until_ready(params | {"layers": layers})
        self.seconds = time.perf_counter() - start
        self.bytes = sum(map(_bytes, self._layers))
        # Of an untied input embedding a step reads a row a slot.
        unread = _bytes(params["embed"]) if "lm_head" in params else 0
        weights = {name: leaf for name, leaf in self.params.items() if name != "blocked_head"}  # a copy
        self.read_bytes = _bytes(weights) - unread
        return self.params

    def release(self) -> None:
        """Drops the references to the policy's weights, and keeps the memory for the next refresh."""
        self.params = None


# -- the drafter -------------------------------------------------------------------------------------------


class QuantizedDrafter(Drafter):
    """The policy drafts for itself (EfficientRollout): no training, and it follows every update.

    Args:
      arguments: see `QuantizedArguments`.
    """

    on_host = False

    def __init__(self, arguments: QuantizedArguments) -> None:
        self._quantizer = arguments.quantizer
        self.policy_weights = QuantizedPolicy(
            default_format(arguments.bits or _default_bits()), self._quantizer
        )

    def attach(self, engine: "DecodeEngine") -> None:
        layouts = None if engine.mesh is None else weight_layouts(engine.config, engine.mesh)
        fmt, kernels = self.policy_weights.format, engine.numerics.kernels
        self.policy_weights = QuantizedPolicy(fmt, self._quantizer, kernels, layouts)

    def refresh(self, params: Params) -> None:
        self.policy_weights.follow(params)

    def metrics(self) -> dict[str, float]:
        """Returns `refresh_seconds` of the last refresh, and `draft_bytes`, the rounded weights in bytes."""
        weights = self.policy_weights
        return {"refresh_seconds": weights.seconds, "draft_bytes": float(weights.bytes)}


def _default_bits() -> int:
    """Bits of a weight that may pay on this device; a warning where none is known to."""
    if target.platform() == "cpu":
        return 8
    if has_kernel("quantized_product"):
        return 4
    warnings.warn(
        f"speculation.drafter: quantized will hardly pay on {target.device().device_kind}: no product of 4"
        " bits is a kernel there, so 8 bits are used; measure one (scripts/bench_kernels.py --tune) or set"
        " the drafter's bits",
        stacklevel=2,
    )
    return 8


def _quantize_layer(
    quantizer: Quantizer,
    fmt: WeightFormat,
    kernels: KernelChoice,
    layouts: dict[str, WeightLayout],
    projections: dict[str, Array],
    before: dict[str, QuantizedWeight] | None,
) -> dict[str, QuantizedWeight]:
    del before

    def quantize(weight: Array) -> QuantizedWeight:
        return quantizer(weight, fmt, kernels.round_to_nearest)

    quantized = {}
    for name, weight in projections.items():
        layout = layouts.get(name)
        rounded = quantize(weight) if layout is None else _quantized_parts(quantize, weight, layout)
        quantized[name] = rounded.replace(implementation=kernels.quantized_product)
    return quantized


def _quantized_parts(
    quantize: Callable[[Array], QuantizedWeight], weight: Array, layout: WeightLayout
) -> QuantizedWeight:
    """Returns a matrix of which every device has quantized its part."""
    on_parts = jax.shard_map(
        quantize, mesh=layout.mesh, in_specs=layout.spec, out_specs=layout.spec, check_vma=False
    )
    return on_parts(weight).replace(inputs=weight.shape[1], layout=layout)


def weight_layouts(config: ModelConfig, mesh: Mesh) -> dict[str, WeightLayout]:
    """Returns the layout of every projection of a layer on a mesh, as the engine holds it."""
    shardings = param_shardings(config, mesh, decoding=True)["layers"][0]
    rows = MESH_AXES["slots"]
    return {name: WeightLayout(mesh, *shardings[name].spec, rows) for name in PROJECTIONS}


def _shapes_of(
    projections: dict[str, Array], before: dict[str, QuantizedWeight] | None
) -> tuple[bool, tuple[tuple[tuple[int, ...], str], ...]]:
    """Returns what a program that quantizes a layer depends on."""
    return before is None, tuple(
        (projections[name].shape, str(projections[name].dtype)) for name in PROJECTIONS
    )


def _bytes(tree: Params | Array) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
