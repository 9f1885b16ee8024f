"""The devices of this process: what a run says about them first, and those whose compilers alone are here.

The extra `compilers` installs the TPU's compiler and NVIDIA's plugin on machines that have neither device.
JAX then tries both, and they print pages of warnings before the first line of a command.
"""

import importlib.util
import os
import sys
from pathlib import Path

_GOOGLE = "0x1ae0"  # vendor of TPUs on the PCI bus
_DEVICE_FILES = (
    "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0", "/dev/vfio/1",
)  # fmt: skip
_ASKED_FOR = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
_PLUGINS = {"xla_cuda12", "xla_cuda13"}


def skip_absent() -> None:
    """Makes JAX use the CPU, without asking the compilers of other devices, where no other device is seen.

    Call it before JAX first asks for devices. It does nothing where the environment says which devices to use
    (`JAX_PLATFORMS`, the TPU's variables), where a device file of a TPU or GPU exists, where a plugin for yet
    another device is installed, or off Linux.
    """
    if any(name in os.environ for name in _ASKED_FOR) or sys.platform != "linux":
        return
    if _device_seen() or not _only_known_plugins():
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read the environment already
        import jax

        jax.config.update("jax_platforms", "cpu")


def _device_seen() -> bool:
    if any(Path(file).exists() for file in _DEVICE_FILES):
        return True
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text(encoding="ascii").strip() == _GOOGLE:
                return True
        except OSError:
            return True  # it cannot be ruled out
    return False


def _only_known_plugins() -> bool:
    """Whether JAX finds no plugin for devices but TPUs and NVIDIA's GPUs."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = [] if plugins is None else [Path(folder) for folder in plugins.submodule_search_locations or ()]
    found = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
    return found - {"__pycache__"} <= _PLUGINS


def devices_in_words() -> str:
    """Returns "8 x TPU v5e", or for a CPU its name: "1 x cpu (AMD EPYC 7B13)"."""
    import jax

    from rljax.provenance import cpu_model

    count, device = jax.device_count(), jax.devices()[0]
    if device.platform == "cpu":
        return f"{count} x cpu ({cpu_model()})"
    return f"{count} x {device.device_kind}"


def cache_in_words(directory: str | None) -> str:
    """Returns how many compiled programs a run finds in its `engine.compilation_cache`."""
    import jax

    from rljax.engine.stored_programs import count_stored

    if directory is None:
        return "compiled programs are not kept"
    if jax.device_count() > 1:  # then JAX's own cache alone keeps programs, and does not say for which run
        count = sum(1 for _ in Path(directory).glob("*-cache"))
    else:
        count = count_stored(directory)
    return f"{count or 'no'} compiled program{'' if count == 1 else 's'} found in {directory}"


def start_line(compute_dtype: str, cache: str | None) -> str:
    """Returns the first line of a run: its devices, number type, and what it finds compiled.

    Args:
      compute_dtype: `policy.compute_dtype`.
      cache: `engine.compilation_cache`.
    """
    return f"device: {devices_in_words()}, {compute_dtype}; {cache_in_words(cache)}"
