"""Choice of the backend of each operation that has kernels, for `rljax/kernels/switch.py`."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from rljax.errors import UserError

Implementation = str | tuple[str, ...] | None

SPLIT_OPERATIONS = ("token_logprobs", "tree_attention", "quantized_product", "round_to_nearest", "compaction")
"""Operations whose kernels also compute on a mesh, each device its shard."""


class Refused(UserError):
    """A backend cannot compute this: the wrong device, type or shape. The message says which."""


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The backend of every operation: a name from `rljax.kernels.switch.IMPLEMENTATIONS`, several names in
    the order to try them, or None for the default for device and policy, which is the same for every number
    of rows (`rljax/kernels/tuned.py`). `mesh` has the devices that kernels compute on, each its shard; None
    where there is one device, or no kernel is named.
    """

    noisy_argmax: Implementation = None
    token_logprobs: Implementation = None
    tree_attention: Implementation = None
    quantized_product: Implementation = None
    round_to_nearest: Implementation = None
    compaction: Implementation = None
    packed_attention: Implementation = None
    gated_product: Implementation = None
    head_products: Implementation = None

    mesh: Mesh | None = None

    def on_mesh(self, mesh: Mesh) -> "KernelChoice":
        """Returns the choice for arrays that are sharded over the devices of `mesh`: `xla` in place of None.

        Raises:
          Refused: a kernel was named that computes on one device only.
        """
        chosen = {}
        for op in _OPERATIONS:
            implementation = getattr(self, op)
            if op not in SPLIT_OPERATIONS:
                require_xla(op, implementation, "computes on one device, but the mesh has several")
            chosen[op] = implementation if implementation and op in SPLIT_OPERATIONS else "xla"
        return KernelChoice(**chosen, mesh=mesh if self._names_kernels(chosen) else None)

    @staticmethod
    def _names_kernels(chosen: dict[str, Implementation]) -> bool:
        return any(backend_names(names) != ("xla",) for names in chosen.values())

    def splits(self, op: str) -> bool:
        """Whether the operation is computed shard by shard (`rljax/kernels/on_mesh.py`)."""
        implementation = getattr(self, op)
        return self.mesh is not None and backend_names(implementation) != ("xla",)


_OPERATIONS = tuple(field.name for field in dataclasses.fields(KernelChoice) if field.name != "mesh")


def require_xla(op: str, implementation: Implementation, why: str) -> None:
    """Raises `Refused` with the reason if kernels were named but not `xla`, where only plain JAX works."""
    if implementation is not None and "xla" not in backend_names(implementation):
        raise Refused(f"kernels.{op}: {implementation} {why}; set xla or null")


def backend_names(implementation: str | Sequence[str]) -> tuple[str, ...]:
    return (implementation,) if isinstance(implementation, str) else tuple(implementation)
