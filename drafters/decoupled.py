"""A small model that drafts on devices of its own, ahead of the verifier (SpecActor, section 4.1).

It drafts the next window while the policy verifies the last one: see `rljax/engine/decoupled_companion.py`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from drafters.eagle.drafting import DraftStrategy
from drafters.small_model import SmallModelArguments, SmallModelDrafter
from rljax.config.decoding import DecoupledConfig
from rljax.engine.companion import Companion
from rljax.engine.decoupled_companion import DecoupledCompanion
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.errors import ConfigError
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.sharding import replicated_axes


class DecoupledDrafter(SmallModelDrafter):
    """A checkpoint that drafts ahead.

    Args:
      arguments: see `SmallModelArguments`.
      config: window and devices.

    Attributes:
      window: the largest window, in tokens.
      goes_on: whether `go_on` drafts; without, drafts are made between passes only.

    Raises:
      ConfigError: as of `SmallModelDrafter`.
    """

    _companion: DecoupledCompanion | None

    def __init__(self, arguments: SmallModelArguments, config: DecoupledConfig) -> None:
        super().__init__(arguments)
        self.window, self._devices = config.window, config.devices
        self.goes_on = True
        self._chosen(verifying=1)  # complains before anything is computed

    def attach(self, engine: DecodeEngine) -> None:
        self.strategies = (DraftStrategy(self.window, 1, self.window),)
        self.companion(engine)

    def mesh(self, policy: Mesh | None) -> Mesh:
        """Returns the mesh of the devices that draft.

        Raises:
          ConfigError: there are no such devices, or they cannot split the model.
        """
        chosen = self._chosen(1 if policy is None else policy.devices.size)
        mesh = Mesh(
            np.asarray(chosen).reshape(1, 1, -1),
            ("data", "fsdp", "tensor"),
            axis_types=(AxisType.Auto,) * 3,
        )
        try:
            replicated_axes(self.config, mesh)
        except ConfigError as error:
            raise ConfigError(
                f"speculation.decoupled.devices: {len(chosen)} cannot split the small model ({error})"
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
        self._companion.windows.windows[slots] = windows
        self._companion.windows.ahead[slots] = ahead

    def ready(self, slots: np.ndarray, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what is to be verified, as `DecoupledCompanion.ready`; waits for drafts where none of the
        slots has any, and where nothing is drafted beside passes.

        Args:
          slots: int32 [n], the slots of the pass.
          length: positions of the target's cache.
          width: most drafts of a slot.
        """
        companion = self._companion
        tokens, scores = companion.ready(slots, width)
        if not self.goes_on or not (tokens >= 0).any():
            companion.fill(slots, length)
            tokens, scores = companion.ready(slots, width)
        return tokens, scores

    def go_on(self, slots: np.ndarray) -> None:
        """The policy verifies drafts of `slots` now; drafts behind them meanwhile, and does not wait."""
        if self.goes_on:
            self._companion.go_on(slots)

    def measured(self) -> list[float]:
        """Returns the seconds of a drafted token of every slot, of all new measurements."""
        return self._companion.measured()

    def metrics(self) -> dict[str, float]:
        """Returns `caught_up` as of `SmallModelDrafter`, and of the last rollout: windows drafted beside
        passes, the share that was ready in time, and drafts thrown away, of a request and at most by one
        rejection.
        """
        if self._companion is None:
            return {}
        counts = self._companion.counts
        return super().metrics() | {
            "decoupled_windows": float(counts.windows),
            "decoupled_ready_share": counts.in_time / max(counts.windows, 1),
            "decoupled_wasted": counts.wasted / max(counts.requests, 1),
            "decoupled_most_wasted": float(counts.most_wasted),
        }
