"""One `implementation=` switch for every operation.

A backend raises `Refused` for arguments that it does not support. If one backend was named, the error reaches
the caller, and no other backend takes its place. Several backends are tried in order; if all refuse, the
error lists every reason. (The design follows Tokamax.)
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from rljax import target
from rljax.errors import UserError, known_names
from rljax.kernels import tuned
from rljax.numerics.kernel_choice import Implementation, Refused, backend_names

IMPLEMENTATIONS = {
    "xla": "base",
    "mosaic_gpu": "mosaic_gpu",
    "mosaic_tpu": "mosaic_tpu",
    "triton": "triton",
    "interpret_gpu": "mosaic_gpu",
    "interpret_tpu": "mosaic_tpu",
    "interpret_triton": "triton",
}
"""Names of backends, and the file of each in an operation's folder."""
_INSTEAD = "name xla, or leave the key out"


def call(
    op: str,
    implementation: Implementation,
    sizes: tuple[int, ...],
    *args: Any,
    function: str | None = None,
    **kwargs: Any,
) -> Any:
    """Computes an operation with the requested backend.

    Args:
      op: name of the operation, and of its folder.
      implementation: see `KernelChoice`. Where a backend of the default refuses, a warning says why.
      sizes: sizes of the policy that the default depends on; each operation documents its numbers.
      function: name of the function in each of the operation's files; None for the operation's.
      args, kwargs: arguments of the function. Interpreting backends also get `interpret=True`.

    Raises:
      Refused: every named backend refused.
    """
    names = tuned.default(op, sizes) if implementation is None else backend_names(implementation)
    refusals: list[str] = []
    for name in names:
        try:
            result = backend(op, name, function)(*args, **kwargs)
        except Refused as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        if implementation is None and refusals:
            warnings.warn(f"kernels.{op}: {name} instead of {'; '.join(refusals)}", stacklevel=2)
        return result
    raise Refused(f"{op}: " + "; ".join(refusals))


def backend(op: str, name: str, function: str | None = None) -> Callable[..., Any]:
    """Returns the function of one backend; arguments as of `call`.

    Raises:
      Refused: the backend does not run on the devices of this process, or there is no such kernel.
      UserError: the name is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise UserError(f"{op}: {name!r} is no implementation; {known_names(name, IMPLEMENTATIONS)}")
    platform = target.platform()
    if name == "mosaic_gpu" and not target.is_hopper():
        raise Refused(f"it runs on NVIDIA GPUs of compute capability 9.0, not on {_device()}; {_INSTEAD}")
    if name == "triton" and platform != "gpu":
        raise Refused(f"it runs on NVIDIA GPUs, not on {_device()}; {_INSTEAD}")
    if name == "mosaic_tpu" and platform != "tpu":
        raise Refused(f"it runs on TPUs, not on {_device()}; {_INSTEAD}")
    file = IMPLEMENTATIONS[name]
    try:
        module = importlib.import_module(f"rljax.kernels.{op}.{file}")
    except ModuleNotFoundError as error:
        if error.name != f"rljax.kernels.{op}.{file}":
            raise
        raise Refused("there is no such kernel for this operation") from error
    compute = getattr(module, function or op)
    return functools.partial(compute, interpret=True) if name.startswith("interpret") else compute


def _device() -> str:
    return f"{target.device().device_kind} ({target.platform()})"
