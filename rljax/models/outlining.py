"""Decoder layers that are traced once, and called or inlined by the compiler.

Decoder layers are equal but for their weights, yet a program with L layers written out is traced and lowered
layer by layer, and so is every kernel in them. Here a layer is a function of the program, which calls it L
times. In contrast to a loop over stacked weights (`jax.lax.scan`), weights and KV cache stay separate
arrays: nothing is stacked for the loop or sliced in it, and checkpoints, shardings and donation do not
change. XLA inlines the calls before anything else, and the compiled program is that of layers written out;
or the calls are marked, and stay. `docs/planning.md` says when.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from rljax import target

_MARK = {"inlineable": "false"}
"""For XLA's inliner of calls (xla/service/call_inliner.cc)."""


def traced_once(
    function: Callable[..., Any], remat: bool = False, outlined: bool = False
) -> Callable[..., Any]:
    """Returns `function` as a function of the program that is traced once for all calls.

    Calls share one function if their arguments have the same structure, shapes and types; arrays that
    `function` closes over count as arguments. Gradients are computed by functions of their own, again one
    for all calls.

    Args:
      function: pure; positional arguments only.
      remat: keep only the arguments for the backward pass, and compute everything else again.
      outlined: the compiler does not inline the calls. Derivatives in forward mode are then not supported,
        and arrays that `function` closes over have no gradient.
    """
    if outlined:
        return _outlined(function, remat)
    return jax.jit(jax.checkpoint(function) if remat else function)


def computed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, whose results the compiler of a CPU keeps as arrays.

    For small integers and masks that every layer reads: the compiler would fuse their computation into every
    kernel that reads them, which then takes longer to compile and computes them anew for each entry.
    """
    return _not_inlined(function) if target.platform() == "cpu" else function


def _outlined(function: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    call = _not_inlined(function)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return (call(*arguments), arguments) if remat else linearized(*arguments)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        return recomputed(kept, cotangents) if remat else transposed(kept, cotangents)

    linearized = _not_inlined(lambda *arguments: jax.vjp(function, *arguments))
    transposed = _not_inlined(lambda pullback, cotangents: pullback(cotangents))
    # Where a compiler inlines calls after all, `jax.checkpoint` prevents it from keeping the activations.
    recomputed = _not_inlined(
        lambda arguments, cotangents: jax.vjp(jax.checkpoint(function), *arguments)[1](cotangents)
    )
    differentiable = jax.custom_vjp(lambda *arguments: call(*arguments))
    differentiable.defvjp(forward, backward)
    return differentiable


def _not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function whose calls in an enclosing program are not inlined."""

    @jax.jit
    def outlined_call(*arguments: Any) -> Any:
        return function(*arguments)

    # Marks the operation that computes a result, which is the call. As a context, `set_xla_metadata` would
    # mark the calls within the function, too.
    return lambda *arguments: set_xla_metadata(outlined_call(*arguments), **_MARK)
