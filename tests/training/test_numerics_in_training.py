"""What a run measures of its processor, says, keeps, and compares when it goes on elsewhere."""

import json

import jax
import pytest

from rljax.config import load_config
from rljax.errors import ConfigError
from rljax.run_directory import RunDirectory
from rljax.training.session import run
from tests.misbehaving_products import every_call, replaced
from tests.training.tiny_run import train, write_config

SMALL = ("warm_start=null", "evaluation.problems=0")


def test_a_run_says_what_it_measured_and_compares_it_on_another_machine(tmp_path, capsys):
    lines = train(tmp_path, *SMALL, "training.steps=1")
    assert lines[1]["mismatch/tokens"] == 0 and lines[1]["mismatch/logprob_abs_max"] == 0.0
    said = capsys.readouterr().out
    directory = RunDirectory(tmp_path / "run")
    (session,) = directory.read_sessions()
    assert "numerics: exact in float32 on this processor, products of" in said
    assert f"fingerprint {session['numerics']}" in said
    assert load_config(directory.config_path).policy.compute_dtype == "float32"  # what auto stood for

    other = session | {"numerics": "0badf00d"}
    directory.sessions_path.write_text(json.dumps(other) + "\n")
    train(tmp_path, *SMALL, "training.steps=2")
    said = capsys.readouterr().out
    assert f"other bits than the last (fingerprint 0badf00d, now {session['numerics']})" in said
    assert directory.read_sessions()[-1]["numerics"] == session["numerics"]
    train(tmp_path, *SMALL, "training.steps=3")
    assert "other bits than the last" not in capsys.readouterr().out


@pytest.mark.long  # the measurement: tests/engine/test_invariance.py
def test_where_nothing_is_exact_a_run_is_refused_or_counts(tmp_path, capsys):
    overrides = (*SMALL, f"engine.compilation_cache={tmp_path}/programs", "training.steps=1")
    jax.clear_caches()  # a run compiles in several threads
    with replaced(every_call):
        with pytest.raises(ConfigError, match="row_invariant: does not hold here"):
            run(load_config(write_config(tmp_path), overrides))
        lines = train(tmp_path, *overrides, "engine.row_invariant=warn")
    jax.clear_caches()
    assert "numerics: not exact in float32" in capsys.readouterr().out
    assert 0 < lines[1]["mismatch/tokens"] <= lines[1]["rollout/tokens"]
