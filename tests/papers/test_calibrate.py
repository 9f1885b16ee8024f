"""scripts/calibrate.py on a policy of one layer: measures, keeps, and reuses."""

import json

import pytest

from rljax.config import load_config, to_yaml
from rljax.papers.efficient_rollout import calibration
from rljax.papers.efficient_rollout.calibration import Calibration
from rljax.papers.efficient_rollout.report import calibration_rows
from tests.papers.test_roofline import roofline, synthetic
from tests.scripts import load_script
from tests.training.tiny_run import ONE_PASS, write_config

calibrate = load_script("calibrate")
variants = load_script("rollout_benchmarks.variants")


@pytest.fixture
def arguments(tmp_path):
    """The tiny run with two caches; a warm start of a million steps would be noticed."""
    keys = (*ONE_PASS, "engine.cache_buckets=[64, 128]", "warm_start.steps=1000000")
    keys += ("speculation.drafter=quantized", "speculation.choice=roofline")
    keys += (f"speculation.calibration_dir={tmp_path}/constants",)
    config = write_config(tmp_path)
    config.write_text(to_yaml(load_config(config, keys)))
    command = ["--config", str(config), "--rounds", "1", "--repeats", "1"]
    return [*command, "--output", str(tmp_path / "calibration.json")]


def test_measures_once_and_then_reuses(arguments, tmp_path, capsys, monkeypatch):
    assert calibrate.main(arguments) == 0
    output = capsys.readouterr().out
    assert "gates" in output and "bandwidth, weights" in output
    content = json.loads((tmp_path / "calibration.json").read_text())
    assert set(content) == {"command", "commit", "date", "machine", "rows"}
    points = {row["name"]: row for row in content["rows"] if "kind" in row}
    assert set(points) == {
        f"calibration/batch 4/cache {length}/{what}"
        for length in (64, 128)
        for what in ("plain", "draft", "verify of 16")
    }
    assert all(row["held_out"] == (row["context"] == 128) for row in points.values())
    # rows: 4 slots of at most 3 drafts each. Attention is computed for all of them.
    verify = points["calibration/batch 4/cache 64/verify of 16"]
    assert (verify["rows"], verify["attended"]) == (16, 16)
    assert verify["value"] == pytest.approx(1e3 * verify["seconds"]) and verify["baseline_value"] > 0
    judged = {row["name"]: row for row in content["rows"] if "kind" not in row}
    assert set(judged) == {
        "calibration/sign, self-drafting",
        "calibration/sign, drafts from the host",
        "calibration/target time error",
    }
    (kept,) = (tmp_path / "constants").iterdir()
    constants = json.loads(kept.read_text())["roofline"]
    assert judged["calibration/target time error"]["constants"] == constants

    # The constants gate any drafter, in any buckets.
    config = load_config(arguments[1], ["speculation.drafter=srt", "engine.cache_buckets=[128]"])
    with variants.open_run(config.model_copy(update={"warm_start": None})) as (run, _):
        roofline = run.speculator.manager._toggle.roofline
    assert roofline.as_json() == constants

    def measure(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "measure", measure)
    (tmp_path / "calibration.json").unlink()
    # Nobody drafts, and nobody asks: they are the same constants.
    assert calibrate.main([*arguments, "speculation.drafter=null", "speculation.choice=expected"]) == 0
    assert "--again measures again" in capsys.readouterr().out
    assert not (tmp_path / "calibration.json").exists()  # nothing was measured
    with pytest.raises(AssertionError, match="measured again"):
        calibrate.main([*arguments, "--again"])
    with pytest.raises(AssertionError, match="measured again"):
        calibrate.main([*arguments, f"speculation.calibration_dir={tmp_path / 'elsewhere'}"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["engine.cache_buckets=[128]"],
            "error: engine.batch_buckets, engine.cache_buckets: [4] and [128] leave",
        ),
        (["--rounds", "0"], "error: --rounds: 0 is too few; use at least 1"),
        (["engine.slots=2"], "error: "),
    ],
)
def test_errors_are_one_line(arguments, capsys, extra, message):
    assert calibrate.main([*arguments, *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_the_cached_verdict_is_the_measured_one():
    """Rows are made of points and constants alone, so a reused calibration prints what was measured."""
    known = Calibration(roofline(), synthetic(roofline()))
    rows = {row.name: row for row in calibration_rows(known)}
    assert rows["calibration/sign, self-drafting"].value == 100
    assert rows["calibration/target time error"].value == pytest.approx(0, abs=1e-6)
    assert all(row.ratio == pytest.approx(1) for row in rows.values() if "kind" in row.details)
