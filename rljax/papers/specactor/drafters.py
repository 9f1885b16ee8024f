"""Drafters on devices of their own, ahead of the verifier (SpecActor, section 4.1).

They draft the next window while the policy verifies the last one: see
`rljax/papers/specactor/drafting_ahead.py`.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from drafters.base import Drafter
from drafters.eagle.arguments import EagleArguments
from drafters.eagle.drafter import EagleDrafter
from drafters.names import checked_arguments, keys_of
from drafters.small_model import SmallModelArguments, SmallModelDrafter
from rljax.engine.companion import Companion
from rljax.engine.engine import DecodeEngine
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.sharding import replicated_axes
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.papers.specactor import DecoupledConfig, SpecActorKeys
from rljax.papers.specactor.decoupled_companion import DecoupledCompanion
from rljax.papers.specactor.slots_ahead import AheadHeadSlots


def make_ahead(config: SpecActorKeys) -> dict[str, Drafter]:
    """The drafter of a run that drafts ahead, by its name; raises as `make_drafters`."""
    arguments = checked_arguments(*keys_of(config, config.drafter), config.drafter, config.args)
    kind = {"eagle": DecoupledEagle, "small_model": DecoupledSmallModel}[config.drafter]
    return {config.drafter: kind(arguments, config.decoupled)}


class OnOwnDevices:
    """What drafters share that draft ahead: their window, in tokens, and their devices."""

    def _take_devices(self, config: DecoupledConfig) -> None:
        """Sets window and devices; complains before anything is computed.

        Raises:
          ConfigError: there are no such devices.
        """
        self.window, self._devices = config.window, config.devices
        self._chosen(verifying=1)

    def _own_mesh(self, policy: Mesh | None, layer: ModelConfig, what: str) -> Mesh:
        """Returns the mesh of the devices that draft.

        Args:
          policy: the policy's mesh.
          layer: architecture of what they split by its heads.
          what: its name, for messages.

        Raises:
          ConfigError: there are no such devices, or they cannot split it.
        """
        chosen = self._chosen(1 if policy is None else policy.devices.size)
        mesh = Mesh(
            np.asarray(chosen).reshape(1, 1, -1),
            ("data", "fsdp", "tensor"),
            axis_types=(AxisType.Auto,) * 3,
        )
        try:
            replicated_axes(layer, mesh)
        except ConfigError as error:
            raise ConfigError(
                f"speculation.decoupled.devices: {len(chosen)} cannot split the {what} ({error})"
            ) from error
        return mesh

    def _chosen(self, verifying: int) -> list[jax.Device]:
        """The devices that draft, where so many verify."""
        devices = jax.local_devices()
        numbers = (verifying,) if self._devices is None else self._devices
        if max(numbers) >= len(devices):
            raise ConfigError(
                f"speculation.decoupled.devices: number {max(numbers)} is needed, and there are"
                f" {len(devices)}, from 0 on, of which {verifying} verify; add devices (on a CPU XLA_FLAGS="
                "--xla_force_host_platform_device_count=2), or set speculation.decoupled.window: 0"
            )
        return [devices[number] for number in numbers]


class DecoupledSmallModel(OnOwnDevices, SmallModelDrafter):
    """A checkpoint that drafts ahead.

    Args:
      arguments: see `SmallModelArguments`.
      config: window and devices.

    Raises:
      ConfigError: as of `SmallModelDrafter`, or there are no such devices.
    """

    _companion: DecoupledCompanion | None

    def __init__(self, arguments: SmallModelArguments, config: DecoupledConfig) -> None:
        SmallModelDrafter.__init__(self, arguments)
        self._take_devices(config)

    def mesh(self, policy: Mesh | None) -> Mesh:
        """Returns the mesh of the devices that draft; see `_own_mesh` for errors."""
        return self._own_mesh(policy, self.config, "small model")

    def numerics(self, policy: Numerics, mesh: Mesh) -> Numerics:
        """Returns its numerics on `mesh`, with the policy's kernels as its own devices can compute them."""
        kernels = dataclasses.replace(policy.kernels, mesh=None)
        if mesh.size > 1:
            kernels = kernels.on_mesh(mesh)
        return dataclasses.replace(super().numerics(policy, None), kernels=kernels)

    def _beside(self, target: DecodeEngine, params: Params, numerics: Numerics, mesh: Mesh) -> Companion:
        return DecoupledCompanion(target, self.config, params, numerics, mesh, self.window)

    def refresh(self, params: Params) -> None:
        super().refresh(params)
        self._companion.count_anew()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `SmallModelDrafter` and of `DraftingAhead`."""
        return super().metrics() | ({} if self._companion is None else self._companion.metrics())


class DecoupledEagle(OnOwnDevices, EagleDrafter):
    """A head that drafts ahead. It is trained beside the policy, on the policy's devices.

    Args:
      arguments: see `EagleArguments`; it drafts chains, so those of trees have no meaning.
      config: window and devices.

    Raises:
      ConfigError: arguments of trees are set, or there are no such devices.
    """

    slots: AheadHeadSlots

    def __init__(self, arguments: EagleArguments, config: DecoupledConfig) -> None:
        for name in ("depths", "top_k", "nodes"):
            if name in arguments.model_fields_set:
                raise ConfigError(
                    f"speculation.args.{name}: is of draft trees, but ahead of the policy the head drafts"
                    " chains of speculation.decoupled.window; leave it out"
                )
        EagleDrafter.__init__(self, arguments)
        self._take_devices(config)

    def attach(self, engine: DecodeEngine) -> AheadHeadSlots:
        self.engine = engine
        mesh, unread = self._own_mesh(engine.mesh, self.config.layer, "head"), self.arguments.unread_bytes
        self.slots = AheadHeadSlots(self.config, engine, self.collector, mesh, self.window, unread)
        return self.slots

    def refresh(self, params: Params) -> None:
        super().refresh(params)
        self.slots.count_anew()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `EagleDrafter` and of `DraftingAhead`."""
        return super().metrics() | self.slots.metrics()
