"""Keys of a mesh of devices."""

from pydantic import Field

from rljax.config.section import Count, Section


class MeshConfig(Section):
    """Devices along each axis of the mesh; the product may not exceed the number of devices."""

    data: Count = Field(
        1,
        description="Number of replicas; each computes a share of the batch. Raise it first to use more"
        " devices.",
    )
    fsdp: Count = Field(
        1,
        description="Devices over which the weights and the optimizer state are sharded. Raise it when they"
        " do not fit.",
    )
    tensor: Count = Field(
        1, description="Devices that split every layer. Raise it to decode faster where links are fast."
    )

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.data * self.fsdp * self.tensor
