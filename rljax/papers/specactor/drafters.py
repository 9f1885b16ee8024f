"""Drafters on devices of their own, ahead of the verifier (SpecActor, section 4.1).

They draft the next window while the policy verifies the last one: see
`rljax/papers/specactor/drafting_ahead.py`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from drafters.base import Drafter
from drafters.eagle.arguments import EagleArguments
from drafters.eagle.drafter import EagleDrafter, PrefilledHead
from drafters.eagle.drafting import DraftStrategy
from drafters.names import checked_arguments, keys_of
from drafters.small_model import SmallModelArguments, SmallModelDrafter
from rljax.engine.companion import Companion
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.engine.state import DecodeState
from rljax.errors import ConfigError
from rljax.models.config import ModelConfig
from rljax.models.sharding import replicated_axes
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.papers.specactor import DecoupledConfig, SpecActorKeys
from rljax.papers.specactor.decoupled_companion import DecoupledCompanion
from rljax.papers.specactor.drafting_ahead import DraftingAhead
from rljax.papers.specactor.slots_ahead import AheadHeadSlots


def make_ahead(config: SpecActorKeys) -> dict[str, Drafter]:
    """The drafter of a run that drafts ahead, by its name; raises as `make_drafters`."""
    arguments = checked_arguments(*keys_of(config, config.drafter), config.drafter, config.args)
    kind = {"eagle": DecoupledEagle, "small_model": DecoupledSmallModel}[config.drafter]
    return {config.drafter: kind(arguments, config.decoupled)}


class OnOwnDevices:
    """What drafters share that draft ahead: their devices, and the windows of their slots.

    Attributes:
      window: the largest window, in tokens.
      goes_on: whether `go_on` drafts; without, drafts are made between passes only.
    """

    _ahead: DraftingAhead | None

    def _take_devices(self, config: DecoupledConfig) -> None:
        """Sets window and devices; complains before anything is computed.

        Raises:
          ConfigError: there are no such devices.
        """
        self.window, self._devices = config.window, config.devices
        self.goes_on = True
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

    # -- windows ---------------------------------------------------------------------------------------------

    def use(self, slots: np.ndarray, windows: np.ndarray, ahead: np.ndarray, goes_on: bool) -> None:
        """Sets how far to draft from now on.

        Args:
          slots: int32 [n].
          windows: int [n], the window of each, 0 for no drafts and at most `window`.
          ahead: bool [n], see `DraftWindows.ahead`.
          goes_on: see the attribute.
        """
        self.goes_on = goes_on
        self._ahead.windows.windows[slots] = windows
        self._ahead.windows.ahead[slots] = ahead

    def ready(self, slots: np.ndarray, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what is to be verified, as `DraftingAhead.ready`; waits for drafts where none of the
        slots has any, and where nothing is drafted beside passes.

        Args:
          slots: int32 [n], the slots of the pass.
          length: positions of the target's cache.
          width: most drafts of a slot.
        """
        ahead = self._ahead
        tokens, scores = ahead.ready(slots, length, width)
        if not self.goes_on or not (tokens >= 0).any():
            ahead.fill(slots)
            tokens, scores = ahead.ready(slots, length, width)
        return tokens, scores

    def go_on(self, slots: np.ndarray) -> None:
        """The policy verifies drafts of `slots` now; drafts behind them meanwhile, and does not wait."""
        if self.goes_on:
            self._ahead.go_on(slots)

    def measured(self) -> list[float]:
        """Returns the seconds of a drafted token of every slot, of all new measurements."""
        return self._ahead.measured()

    def window_metrics(self) -> dict[str, float]:
        """Returns, of the last rollout: windows drafted beside passes, the share that was ready in time, and
        drafts thrown away, of a request and at most by one rejection.
        """
        if self._ahead is None:
            return {}
        counts = self._ahead.counts
        return {
            "decoupled_windows": float(counts.windows),
            "decoupled_ready_share": counts.in_time / max(counts.windows, 1),
            "decoupled_wasted": counts.wasted / max(counts.requests, 1),
            "decoupled_most_wasted": float(counts.most_wasted),
        }


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

    @property
    def _ahead(self) -> DecoupledCompanion | None:
        return self._companion

    def attach(self, engine: DecodeEngine) -> None:
        self.strategies = (DraftStrategy(self.window, 1, self.window),)
        self.companion(engine)

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
        """A rollout begins, whose windows are counted: the model does not follow the policy."""
        self._companion.count_anew()

    def insert(
        self,
        prefilled: Sequence[Sequence[int]],
        assignments: Sequence[Assignment],
        requests: Sequence[int],
    ) -> None:
        super().insert(prefilled, assignments, requests)
        slots = [assignment.slot for assignment in assignments]
        keys = [assignment.noise_key for assignment in assignments]
        self._companion.entitle(slots, keys, [assignment.max_response for assignment in assignments])

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `SmallModelDrafter` and of `window_metrics`."""
        return super().metrics() | self.window_metrics()


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
        self._ahead = None

    def attach(self, engine: DecodeEngine) -> None:
        self._engine = engine
        mesh = self._own_mesh(engine.mesh, self.config.layer, "head")
        self.slots = AheadHeadSlots(self.config, engine, mesh, self.window, self.arguments.unread_bytes)
        self._ahead = self.slots
        self.strategies = (DraftStrategy(self.window, 1, self.window),)

    def refresh(self, params: Params) -> None:
        super().refresh(params)
        self.slots.count_anew()

    def pretend(self, state: DecodeState) -> None:
        self.slots.pretend(state)

    def insert(
        self, prefilled: PrefilledHead, assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        super().insert(prefilled, assignments, requests)
        self.slots.enter(
            [assignment.slot for assignment in assignments],
            [prefilled.sizes[assignment.row] for assignment in assignments],
            [assignment.noise_key for assignment in assignments],
            [assignment.max_response for assignment in assignments],
        )

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        super().append(slots, sizes, tokens, counts)
        self.slots.resize(slots, (np.asarray(sizes) + np.asarray(counts)).tolist())

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `EagleDrafter` and of `window_metrics`."""
        return super().metrics() | self.window_metrics()
