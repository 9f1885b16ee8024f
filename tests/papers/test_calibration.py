"""Calibrations are kept for one policy, number type, device and JAX version, and found for no other."""

import dataclasses
import json

import pytest

from drafters.quantized import WeightFormat
from rljax.errors import UserError
from rljax.models.config import ModelConfig
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.rows import Numerics
from rljax.papers.efficient_rollout import calibration as module
from rljax.papers.efficient_rollout.calibration import (
    Calibration,
    calibration_key,
    calibration_path,
    load_calibration,
    save_calibration,
)
from rljax.papers.efficient_rollout.roofline import Point
from tests.papers.test_roofline import roofline

CONFIG = ModelConfig("qwen3", 64, 48, 2, 4, 2, 16, 80)
KNOWN = Calibration(roofline(), [Point("verify", 2, 128, 8, 16, 0.25)])


@pytest.fixture
def key():
    kernels = KernelChoice(quantized_product=("mosaic_gpu", "xla"))  # a tuple, which no file can hold
    return calibration_key(CONFIG, Numerics(kernels=kernels), WeightFormat())


def test_anything_else_is_another_calibration(tmp_path, key, monkeypatch):
    path = save_calibration(tmp_path, key, KNOWN)
    assert path == calibration_path(tmp_path, key) and path.name.startswith("qwen3-")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    others = [
        calibration_key(dataclasses.replace(CONFIG, mlp_size=96), Numerics(), WeightFormat()),
        calibration_key(CONFIG, Numerics(compute_dtype="bfloat16"), WeightFormat()),
        calibration_key(CONFIG, Numerics(), WeightFormat()),
        calibration_key(CONFIG, Numerics(row_invariant=False), WeightFormat()),
        calibration_key(CONFIG, Numerics(), WeightFormat(8, 0)),
        calibration_key(CONFIG, Numerics(), WeightFormat(), devices=8),
    ]
    facts = module.machine_facts()
    for fact in ("accelerator", "cpu", "vectors", "cores", "jax"):
        monkeypatch.setattr(module, "machine_facts", lambda fact=fact: {**facts, fact: "another"})
        others.append(calibration_key(CONFIG, Numerics(), WeightFormat()))
    assert all(load_calibration(tmp_path, other) is None for other in others)
    assert len({json.dumps(each, sort_keys=True) for each in [key, *others]}) == 1 + len(others)
    assert load_calibration(tmp_path, key) == KNOWN


def test_what_cannot_be_read_or_written_or_is_another_devices(tmp_path, key):
    """A file of another device under our name, or a damaged one, counts as none; else it is one line."""
    theirs = save_calibration(tmp_path, {**key, "device": "1 x NVIDIA H200"}, KNOWN)
    theirs.rename(calibration_path(tmp_path, key))
    with pytest.warns(UserWarning, match="measured for something else"):
        assert load_calibration(tmp_path, key) is None
    for text in ("", "{}", "[]", '{"key": 1'):
        save_calibration(tmp_path, key, KNOWN).write_text(text)
        with pytest.warns(UserWarning, match="cannot be read"):
            assert load_calibration(tmp_path, key) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a calibration cannot be kept there"):
        save_calibration(tmp_path / "file", key, KNOWN)
