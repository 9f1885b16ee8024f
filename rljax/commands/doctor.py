"""What this installation can do, and what installs the rest: `rljax doctor`.

A line each on Python, JAX, the devices, number types, row-invariance, the compilation cache and the hub, then
on every extra. The exit status is 0 when the core works: a missing extra is no failure.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rljax.accelerators import skip_absent

_PROJECT = Path(__file__).resolve().parent.parent.parent / "pyproject.toml"


@dataclasses.dataclass(frozen=True)
class Extra:
    """Part of rljax that needs more than the core.

    Attributes:
      purpose: what it is for.
      modules: what it imports.
    """

    purpose: str
    modules: tuple[str, ...]


EXTRAS = {
    "cuda": Extra("NVIDIA GPUs", ("jax_plugins.xla_cuda13",)),
    "tpu": Extra("TPUs", ("libtpu",)),
    "cluster": Extra("rollout workers on several machines", ("ray",)),
    "serve": Extra("rljax serve", ("uvicorn", "starlette", "prometheus_client")),
    "jetstream": Extra("JetStream's interfaces", ("jetstream",)),
    "datasets": Extra("tasks from data sets", ("datasets", "pyarrow")),
    "endpoints": Extra("rewards by a judge or a reward model behind HTTP", ("httpx",)),
    "gguf": Extra("GGUF files", ("gguf",)),
    "math": Extra("rewards for mathematics", ("math_verify",)),
    "reasoning-gym": Extra("tasks of Reasoning Gym", ("reasoning_gym",)),
    "wandb": Extra("Weights & Biases", ("wandb",)),
    "mlflow": Extra("MLflow", ("mlflow",)),
}
"""Extras for users; those that pyproject.toml does not have are not shown."""
FOR_DEVELOPERS = ("dev", "docs", "compilers")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
      subject: what the line is about.
      text: what was found.
      failed: whether the core does not work because of it.
      missing: whether it is an extra that is not installed.
    """

    subject: str
    text: str
    failed: bool = False
    missing: bool = False

    def __str__(self) -> str:
        status = "FAIL" if self.failed else "-" if self.missing else "ok"
        return f"{status:<4} {self.subject}: {self.text}"


def declared() -> tuple[str, list[str], list[str], str]:
    """Returns version, requirements of the core, extras, and supported Python: of the checkout, if this is
    one, else of the installed distribution.
    """
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
        extras = list(project["optional-dependencies"])
        return project["version"], project["dependencies"], extras, project["requires-python"]
    metadata = importlib.metadata.metadata("rljax")
    core = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    extras = metadata.get_all("Provides-Extra") or []
    return metadata["Version"], core, list(extras), metadata["Requires-Python"]


def _missing(modules: Iterable[str]) -> list[str]:
    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:  # the package that should hold it is missing
            return False

    return [name for name in modules if not found(name)]


def extra_lines(extras: Sequence[str]) -> Iterator[Finding]:
    """One line for every extra of these that users may want: there, or the command that installs it."""
    for name, extra in EXTRAS.items():
        if name not in extras:
            continue
        missing = _missing(extra.modules)
        if missing:
            text = f"{extra.purpose}: needs {', '.join(missing)}; pip install 'rljax[{name}]'"
            yield Finding(f"extra {name}", text, missing=True)
        else:
            yield Finding(f"extra {name}", f"{extra.purpose}: installed")


def core_lines(requirements: Sequence[str], python: str) -> Iterator[Finding]:
    """Lines on Python and the libraries of the core: versions, and the range that rljax supports."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    supported = SpecifierSet(python).contains(version, prereleases=True)
    yield Finding("Python", f"{version} (supported: {python})", not supported)
    wrong = []
    for requirement in map(Requirement, requirements):
        try:
            have = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            have = None
        fits = have is not None and requirement.specifier.contains(have, prereleases=True)
        if requirement.name == "jax":
            text = f"{have or 'not installed'} (supported: {requirement.specifier})"
            yield Finding("JAX", text if fits else f"{text}; pip install '{requirement}'", not fits)
        elif not fits:
            wrong.append(f"{requirement.name} {have or 'is missing'}; pip install '{requirement}'")
    text = "; ".join(wrong) or f"{len(requirements)} libraries, all in their supported ranges"
    yield Finding("core", text, bool(wrong))


def device_lines() -> Iterator[Finding]:
    """Lines on the devices, their number types, and whether bits depend on the number of rows."""
    import jax
    import jax.numpy as jnp

    from rljax.accelerators import devices_in_words
    from rljax.provenance import num_cores, vectors

    try:
        total = int(jnp.arange(8).sum())
    except Exception as error:  # whatever a driver raises
        yield Finding("devices", f"{type(error).__name__}: {str(error).splitlines()[0]}", True)
        return
    cores = f", {num_cores()} cores, {vectors() or 'no'} vectors" if jax.default_backend() == "cpu" else ""
    yield Finding("devices", devices_in_words() + cores, total != 28)
    yield Finding("number types", _number_types(jax.default_backend()))
    yield Finding("row-invariance", _invariance())


def _number_types(backend: str) -> str:
    from rljax.provenance import cpu_flags

    if backend != "cpu":
        return "float32, bfloat16 (faster, and what policy.compute_dtype: auto takes here)"
    fast = [name for name in ("amx_bf16", "avx512_bf16") if name in cpu_flags()]
    if fast:
        return f"float32, bfloat16 ({fast[0]}; policy.compute_dtype: auto measures which is faster)"
    return "float32; bfloat16 works, but this processor computes it slowly"


def _invariance() -> str:
    """Measures a tiny policy in the number type of `policy.compute_dtype: auto`, in seconds."""
    import jax

    from rljax.engine.buckets import make_buckets
    from rljax.engine.invariance import measure, row_counts
    from rljax.models.config import ModelConfig
    from rljax.numerics.rows import Numerics

    policy = ModelConfig("qwen3", 256, 64, 1, 4, 2, 16, 192, qk_norm=True, tie_embeddings=True)
    buckets = make_buckets(4, 64, True, batch_buckets=(1, 4), cache_buckets=(64,), verify_buckets=(4,))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        result = measure(policy, Numerics(True, dtype), row_counts(buckets))
    except Exception as error:
        return f"could not be measured: {type(error).__name__}: {str(error).splitlines()[0]}"
    found = f"exact in {dtype}" if result.exact else f"NOT exact in {dtype}: {'; '.join(result.failures)}"
    return f"{found} for a tiny policy; every run measures its own (docs/row-invariance.md)"


def _cache() -> Finding:
    from rljax.accelerators import cache_in_words
    from rljax.config import EngineConfig

    path = Path(EngineConfig().compilation_cache or "").absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        text = f"{path} cannot be written ({error.strerror}); set engine.compilation_cache"
        return Finding("compilation cache", text)
    return Finding("compilation cache", cache_in_words(str(path)))


def _configs() -> Finding:
    from rljax.config import load_config
    from rljax.config.packaged import packaged_names
    from rljax.errors import UserError

    try:
        load_config("quickstart")
    except UserError as error:
        return Finding("configs", str(error), True)
    return Finding("configs", f"--config knows {', '.join(packaged_names())}")


def findings() -> Iterator[Finding]:
    """All lines, in order; those that need JAX only where it is installed."""
    version, requirements, extras, python = declared()
    yield Finding("rljax", f"{version} in {Path(__file__).resolve().parent.parent}")
    core = list(core_lines(requirements, python))
    yield from core
    if not _missing(["jax", "jaxlib"]):
        yield from device_lines()
        yield _cache()
    yield _configs()
    if not _missing(["huggingface_hub"]):
        from rljax.hub import state

        yield Finding("hub", state())
    yield from extra_lines(extras)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.parse_args(argv)
    skip_absent()
    failed = False
    for finding in findings():
        print(finding, flush=True)
        failed |= finding.failed
    if failed:
        print("error: the core does not work; see the lines that say FAIL", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
