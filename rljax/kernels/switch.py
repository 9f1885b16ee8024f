"""One `implementation=` switch for every operation.

A backend that cannot compute what it is given raises `Refused`. Where one backend was named, that is the
caller's error: nothing else is computed in its place. Where several were, they are tried in their order, and
if all refuse, the error has every reason. (The shape is Tokamax's; the code is ours.)
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax

from rljax.errors import UserError, known_names
from rljax.kernels import tuned
from rljax.numerics.kernel_choice import Implementation, Refused, backend_names

IMPLEMENTATIONS = {
    "xla": "base",
    "mosaic_gpu": "mosaic_gpu",
    "mosaic_tpu": "mosaic_tpu",
    "interpret_gpu": "mosaic_gpu",
    "interpret_tpu": "mosaic_tpu",
}
"""Names of backends, and the file of an operation's folder that has each."""


def call(op: str, implementation: Implementation, sizes: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """Computes an operation by the backend that is asked for.

    Args:
      op: its folder, and the name of the function in each of its files.
      implementation: see `KernelChoice`.
      sizes: sizes of the policy that the default depends on; each operation documents its numbers.
      args, kwargs: arguments of the function. Backends that interpret get `interpret=True` as well.

    Raises:
      Refused: the one backend named cannot, or none of several can.
    """
    wanted = tuned.default(op, sizes) if implementation is None else backend_names(implementation)
    refusals = []
    for name in wanted:
        try:
            function = backend(op, name)
            return function(*args, **kwargs)
        except Refused as refusal:
            refusals.append(f"{name}: {refusal}")
    raise Refused(f"{op}: " + "; ".join(refusals))


def backend(op: str, name: str) -> Callable[..., Any]:
    """The function of one backend, on the devices of this process.

    Raises:
      Refused: they are not what it runs on.
    """
    if name not in IMPLEMENTATIONS:
        raise UserError(f"{op}: {name!r} is no implementation; {known_names(name, IMPLEMENTATIONS)}")
    platform = jax.default_backend()
    if name == "mosaic_gpu" and not (platform == "gpu" and _is_hopper()):
        raise Refused(f"it runs on NVIDIA GPUs of compute capability 9.0, not on {_device()}")
    if name == "mosaic_tpu" and platform != "tpu":
        raise Refused(f"it runs on TPUs, not on {_device()}")
    file = IMPLEMENTATIONS[name]
    try:
        module = importlib.import_module(f"rljax.kernels.{op}.{file}")
    except ModuleNotFoundError as error:
        if error.name != f"rljax.kernels.{op}.{file}":
            raise
        raise Refused("there is no such kernel for this operation") from error
    function = getattr(module, op)
    if not name.startswith("interpret"):
        return function

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        return function(*args, interpret=True, **kwargs)

    return interpreted


def _is_hopper() -> bool:
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def _device() -> str:
    return f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
