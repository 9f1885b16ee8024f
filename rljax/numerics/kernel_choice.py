"""Choice of the backend of each operation that has kernels, for `rljax/kernels/switch.py`."""

import dataclasses
from collections.abc import Sequence

from rljax.errors import UserError

Implementation = str | tuple[str, ...] | None


class Refused(UserError):
    """A backend cannot compute this: the wrong device, type or shape. The message says which."""


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The backend of every operation: a name from `rljax.kernels.switch.IMPLEMENTATIONS`, several names in
    the order to try them, or None for the default for device and policy, which is the same for every number
    of rows (`rljax/kernels/tuned.py`).
    """

    noisy_argmax: Implementation = None
    token_logprobs: Implementation = None
    tree_attention: Implementation = None
    quantized_product: Implementation = None
    round_to_nearest: Implementation = None
    compaction: Implementation = None

    def on_mesh(self) -> "KernelChoice":
        """Returns the choice for arrays that are sharded over devices: `xla`, also in place of None.

        Raises:
          Refused: a kernel was named.
        """
        for field in dataclasses.fields(self):
            why = "computes on one device, but the mesh has several"
            require_xla(field.name, getattr(self, field.name), why)
        return KernelChoice(**{field.name: "xla" for field in dataclasses.fields(self)})


def require_xla(op: str, implementation: Implementation, why: str) -> None:
    """Raises `Refused` with the reason if kernels were named but not `xla`, where only plain JAX works."""
    if implementation is not None and "xla" not in backend_names(implementation):
        raise Refused(f"kernels.{op}: {implementation} {why}; set xla or null")


def backend_names(implementation: str | Sequence[str]) -> tuple[str, ...]:
    return (implementation,) if isinstance(implementation, str) else tuple(implementation)
