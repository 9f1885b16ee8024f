"""Measuring the passes that the roofline is fitted to, and keeping its constants for later runs.

EfficientRollout, appendix E.3: the roofline is calibrated once for a pair of model and hardware, by a sweep
over batch sizes, sequence lengths and numbers of verified tokens, and reused by all runs.
"""

import dataclasses
import hashlib
import json
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from drafters.base import Drafter
from drafters.quantized import QuantizedPolicy, WeightFormat, default_format
from rljax.engine.engine import DecodeEngine
from rljax.engine.kv_cache import cache_dtype
from rljax.errors import ConfigError, UserError
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.papers.efficient_rollout.fit import fit, held_out
from rljax.papers.efficient_rollout.roofline import Point, Roofline, policy_costs
from rljax.processes import copied_from_first
from rljax.provenance import machine_facts
from rljax.speculation.warm_up import time_drafts, time_passes


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A roofline, and all measured points, including those that it was not fitted to."""

    roofline: Roofline
    points: Sequence[Point]


def measure(
    engine: DecodeEngine,
    params: Params,
    draft_params: Params,
    rounds: int,
    repeats: int,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Point]:
    """Times plain steps, verifying passes and draft steps of every batch and cache bucket.

    Medians of `rounds` * `repeats` each. The shapes take turns, so that a spell in which the machine is busy
    falls on all of them. No token should end a sequence (`eos_token_ids` empty): idle slots would shorten the
    measured times.
    """
    measured: dict[tuple[str, int, int, int, int], list[float]] = {}
    for round_ in range(rounds):
        for batch in engine.buckets.batch:
            widths = dict(engine.buckets.passes(batch))
            for length in engine.buckets.cache:
                progress(f"round {round_ + 1} of {rounds}: {batch} slots, {length} positions")
                passes = time_passes(engine, params, batch, length, repeats)
                drafts = time_drafts(engine, draft_params, batch, length, repeats)
                measured.setdefault(("draft", batch, length, batch, batch), []).extend(drafts)
                for rows, seconds in passes.items():
                    shape = ("plain", batch, length, batch, batch)
                    if rows:
                        shape = ("verify", batch, length, rows, batch * (widths[rows] + 1))
                    measured.setdefault(shape, []).extend(seconds)
    return [Point(*shape, statistics.median(seconds)) for shape, seconds in measured.items()]


def calibrate(
    engine: DecodeEngine,
    params: Params,
    fmt: WeightFormat,
    rounds: int,
    repeats: int,
    progress: Callable[[str], None] = lambda message: None,
) -> Calibration:
    """Measures, and fits the roofline to the points that are not held out for the gates.

    Args:
      engine: the decode engine to measure; see `measure`.
      params: the policy's weights, from `engine.load_params`.
      fmt: format of the self-drafter's weights.
      rounds, repeats, progress: see `measure`.
    """
    draft_params = QuantizedPolicy(fmt, kernels=engine.numerics.kernels).refresh(params)
    points = measure(engine, params, draft_params, rounds, repeats, progress)
    to_fit, _ = held_out(points)
    return Calibration(fit(policy_costs(engine.config, engine.numerics, fmt), to_fit), points)


def measure_roofline(engine: DecodeEngine, drafter: Drafter, params: Params) -> Roofline:
    """The roofline of an engine and a drafter by a short measurement, whose constants are not kept."""
    return calibrate(engine, params, draft_format(drafter), rounds=3, repeats=1).roofline


def draft_format(drafter: Drafter) -> WeightFormat:
    """The format of the self-drafter's weights that a calibration has: the quantized drafter's own, for
    others the device's default.
    """
    if drafter.policy_weights is not None:
        return drafter.policy_weights.format
    return default_format(8 if jax.default_backend() == "cpu" else 4)


def roofline_of(engine: DecodeEngine, drafter: Drafter, directory: str) -> Roofline:
    """The constants that were measured for an engine and a drafter.

    Raises:
      ConfigError: `directory` has none.
    """
    devices = 1 if engine.mesh is None else engine.mesh.size
    key = calibration_key(engine.config, engine.numerics, draft_format(drafter), devices)
    calibration = copied_from_first(lambda: load_calibration(directory, key))
    if calibration is None:
        raise ConfigError(
            f"speculation.choice: roofline finds no constants of this policy and device in {directory}; run"
            " scripts/calibrate.py with this config first"
        )
    return calibration.roofline


# -- the cache ---------------------------------------------------------------------------------------------


def calibration_key(
    config: ModelConfig, numerics: Numerics, fmt: WeightFormat, devices: int = 1
) -> dict[str, Any]:
    """Everything that a calibration depends on: architecture, number types, device and JAX version.

    Values are as JSON gives them back.

    Args:
      config: the policy's architecture.
      numerics: numerics of the policy.
      fmt: format of the self-drafter's weights.
      devices: devices that share a pass.
    """
    machine = machine_facts()
    one_device = dataclasses.replace(numerics.kernels, mesh=None)
    numbers = dataclasses.asdict(dataclasses.replace(numerics, kernels=one_device))
    del numbers["kernels"]["mesh"]  # `devices` tells
    key = {
        "policy": dataclasses.asdict(config),
        "numerics": numbers,
        "kv_cache": str(cache_dtype(numerics)),
        "draft": dataclasses.asdict(fmt),
        # JAX calls every processor "cpu".
        "device": machine["accelerator"]
        or f"{machine['cpu']}, {machine['vectors']}, {machine['cores']} cores",
        "devices": devices,
        "jax": machine["jax"],
    }
    return json.loads(json.dumps(key))  # kernels that are tried in turn are a tuple; in a file, a list


def calibration_path(directory: str | os.PathLike[str], key: dict[str, Any]) -> Path:
    """The file of a calibration with this key, in `directory`."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(directory) / f"{key['policy']['architecture']}-{digest}.json"


def save_calibration(
    directory: str | os.PathLike[str], key: dict[str, Any], calibration: Calibration
) -> Path:
    """Writes a calibration, in place of one with the same key. Returns its file.

    Raises:
      UserError: the file cannot be written.
    """
    path = calibration_path(directory, key)
    content = {
        "key": key,
        "roofline": calibration.roofline.as_json(),
        "points": [dataclasses.asdict(point) for point in calibration.points],
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: a calibration cannot be kept there: {error.strerror}") from error
    return path


def load_calibration(directory: str | os.PathLike[str], key: dict[str, Any]) -> Calibration | None:
    """The stored calibration with this key; None if there is none.

    A file that was measured for something else, such as another device, or that is damaged, is ignored with a
    warning.
    """
    path = calibration_path(directory, key)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            warnings.warn(f"{path}: ignored, since it was measured for something else", stacklevel=2)
            return None
        points = [Point(**point) for point in content["points"]]
        return Calibration(Roofline.from_json(content["roofline"]), points)
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{path}: ignored, since it cannot be read: {error!r}", stacklevel=2)
        return None
