"""What `policy.compute_dtype: auto` stands for."""

import json

import pytest

from rljax.engine import number_type
from rljax.engine.number_type import product_seconds, with_number_type
from rljax.models.huggingface import load_model_config
from tests.configs import experiment
from tests.models.checkpoints import make_checkpoint

SLOW, FAST = {"float32": 1.0, "bfloat16": 1.0}, {"float32": 1.0, "bfloat16": 0.5}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy") / "tiny"
    make_checkpoint(directory, "qwen2")
    return directory


@pytest.fixture
def config(policy, tmp_path, monkeypatch):
    """A run with a policy that counts as large, on a processor that is fast in bfloat16."""
    monkeypatch.setattr(number_type, "_LEAST_PARAMS", 1)
    monkeypatch.setattr(number_type, "product_seconds", lambda model, exact: FAST)
    return experiment(policy={"path": str(policy)}, engine={"compilation_cache": str(tmp_path / "cache")})


def chosen(config, recorded=None):
    return with_number_type(config, recorded).policy.compute_dtype


def changed(config, **policy):
    return config.model_copy(update={"policy": config.policy.model_copy(update=policy)})


def test_the_faster_type_is_taken_and_kept(config, tmp_path, monkeypatch):
    assert chosen(config) == "bfloat16"
    monkeypatch.setattr(number_type, "product_seconds", lambda model, exact: SLOW)
    assert chosen(config) == "bfloat16"  # as it was measured
    (kept,) = (tmp_path / "cache" / "numerics").glob("type-*.json")
    assert json.loads(kept.read_bytes()) == "bfloat16"
    for content in ('"float64"', "[]", "{", ""):
        kept.write_text(content)
        assert chosen(config) == "float32"  # measured anew
    elsewhere = config.engine.model_copy(update={"compilation_cache": None})
    assert chosen(config.model_copy(update={"engine": elsewhere})) == "float32"


def test_a_type_that_is_not_exact_is_not_taken(config, monkeypatch):
    class NotExact:
        exact = False

    monkeypatch.setattr(number_type, "measured", lambda *args: NotExact)
    assert chosen(config) == "float32"
    monkeypatch.setattr(number_type, "_LEAST_PARAMS", 2)
    engine = config.engine.model_copy(update={"row_invariant": False})
    assert chosen(config.model_copy(update={"engine": engine})) == "bfloat16"


def test_who_is_not_measured(config, monkeypatch):
    def fail(model, exact):
        raise AssertionError("measured")

    monkeypatch.setattr(number_type, "product_seconds", fail)
    assert chosen(config, "bfloat16") == "bfloat16" and chosen(config, "float32") == "float32"
    assert chosen(changed(config, compute_dtype="bfloat16")) == "bfloat16"
    assert chosen(changed(config, path=None)) == "float32"
    monkeypatch.setattr(number_type, "_LEAST_PARAMS", 50_000_000)
    assert chosen(config) == "float32"  # too small


@pytest.mark.parametrize("exact", [True, False])
def test_products_are_measured_in_both_types(exact, policy):
    model = load_model_config(policy)
    seconds = product_seconds(model, exact)
    assert set(seconds) == {"float32", "bfloat16"} and all(0.0 < value < 60.0 for value in seconds.values())
