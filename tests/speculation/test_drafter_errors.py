"""Drafters that break the protocol beside drafting, and drafters that take over from another one."""

import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drafters.base import Drafter, Outcome
from drafters.registry import make_drafter
from rljax.config.speculation import SpeculationConfig
from rljax.engine.buckets import Buckets
from rljax.errors import DrafterError
from rljax.numerics.rows import Numerics
from rljax.requests import DecodeStatistics
from rljax.speculation.idle_requests import make_idle_requests
from rljax.speculation.speculator import Speculator
from tests.configs import NEEDS_PAPERS
from tests.tiny_policy import make_requests

WITH_AND_WITHOUT = pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=NEEDS_PAPERS)])


class Quiet(Drafter):
    """Drafts nothing; reports and keeps what it is given."""

    def __init__(self, metrics=None, state=None):
        self._metrics = {} if metrics is None else metrics
        self._state = {} if state is None else state
        self.loaded = None

    def metrics(self):
        return self._metrics

    def state(self):
        return self._state

    def load_state(self, state):
        self.loaded = state


def speculator(drafter, ahead=False, name="mine"):
    """One that is never asked to decode: it needs no engine."""
    idle = make_idle_requests(SpeculationConfig(run_ahead_below=1)) if ahead else None
    engine = types.SimpleNamespace(buckets=Buckets((4,), (64,)), numerics=Numerics(), mesh=None)
    speculating = Speculator(engine, {name: drafter}, 4, idle)
    if ahead:
        speculating.drafters[name].begin([])
    return speculating


def only(speculating):
    """Its drafter."""
    (drafter,) = speculating.drafters.values()
    return drafter


def error_of(call, *arguments):
    with pytest.raises(DrafterError) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message.removeprefix("speculation.drafter mine: ")


# -- metrics -----------------------------------------------------------------------------------------------


@WITH_AND_WITHOUT
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda: None, "NoneType None, expected a dict of numbers by name"),
        ([("loss", 1.0)], "list [('loss', 1.0)], expected a dict of numbers by name"),
        ("loss", "str 'loss', expected a dict of numbers by name"),
        ({3: 1.0}, "a dict with the key 3, expected a dict of numbers by name"),
        ({"loss": "low"}, "'loss' as str 'low', expected a number"),
        ({"loss": None}, "'loss' as NoneType None, expected a number"),
        ({"loss": 1j}, "'loss' as complex 1j, expected a number"),
        ({"loss": [1.0, 2.0]}, "'loss' as list [1.0, 2.0], expected a number"),
        ({"loss": np.zeros((2, 1))}, "'loss' as an array of float64 [2, 1], expected a number"),
        ({"loss": np.array("low")}, "'loss' as an array of <U3 [], expected a number"),
        ({"accepted": 3}, "'accepted', which says something else already: give it another name"),
    ],
    ids=range(11),
)
def test_metrics_that_are_none(metrics, message, ahead):
    drafter = Quiet(metrics)
    if callable(metrics):
        drafter.metrics = metrics
    assert error_of(speculator(drafter, ahead).metrics, DecodeStatistics()) == f"metrics returned {message}"


@NEEDS_PAPERS
@pytest.mark.parametrize("name", ["run_ahead_tokens", "ahead_agreed"])
def test_names_of_run_ahead_are_taken_where_it_runs(name):
    assert f"'{name}', which says" in error_of(speculator(Quiet({name: 1}), True).metrics, DecodeStatistics())
    assert speculator(Quiet({name: 1})).metrics(DecodeStatistics())[f"speculation/{name}"] == 1


@pytest.mark.parametrize("value", [2, 0.5, True, np.float32(1), np.array(3), jnp.float32(1), float("nan")])
def test_numbers_of_any_kind_are_metrics(value):
    found = speculator(Quiet({"loss": value})).metrics(DecodeStatistics())
    assert found["speculation/loss"] is value


# -- state -------------------------------------------------------------------------------------------------


EXPECTED = "expected a numpy array of numbers or text"


@WITH_AND_WITHOUT
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([np.zeros(2)], "list [array([0., 0.])], expected a dict of numpy arrays by name"),
        ({("a", 1): np.zeros(2)}, "a dict with the key ('a', 1), expected a dict of numpy arrays by name"),
        ({"x": [1, 2]}, f"'x' as list [1, 2], {EXPECTED}"),
        ({"x": 1.0}, f"'x' as float 1.0, {EXPECTED}"),
        ({"x": np.array([{}, None])}, f"'x' as an array of object [2], {EXPECTED}"),
        ({"x": np.zeros(2, ml_dtypes.bfloat16)}, f"'x' as an array of bfloat16 [2], {EXPECTED}"),
    ],
    ids=range(6),
)
def test_states_that_no_checkpoint_gives_back(state, message, ahead):
    assert error_of(speculator(Quiet(state=state), ahead).state) == f"state returned {message}"


@NEEDS_PAPERS
def test_names_of_a_state_collide_with_nothing(tmp_path):
    """Not with the speculator's own, not with what files of arrays are made of."""
    names = ("lengths_sizes", "ahead_keys", "file", "a/b", "")
    state = {name: np.full(3, i) for i, name in enumerate(names)}
    saved = speculator(Quiet(state=state), ahead=True).state()
    with open(tmp_path / "state.npz", "wb") as file:
        np.savez(file, **saved)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as arrays:
        again = speculator(Quiet(), ahead=True)
        again.load_state(dict(arrays))
    loaded = only(again)._fallback.loaded
    assert loaded.keys() == state.keys()
    for name in names:
        np.testing.assert_array_equal(loaded[name], state[name])


# -- what is raised ----------------------------------------------------------------------------------------


@WITH_AND_WITHOUT
@pytest.mark.parametrize("method", ["learn", "state", "load_state", "metrics"])
def test_what_is_raised_is_one_short_line(method, ahead):
    def raises(*_):
        raise ValueError(np.zeros((300, 3)), "no\nidea")

    drafter = Quiet()
    setattr(drafter, method, raises)
    speculating = speculator(drafter, ahead)
    arguments = {"learn": ([],), "load_state": ({"mine/x": np.zeros(1)},), "metrics": (DecodeStatistics(),)}
    message = error_of(getattr(speculating, method), *arguments.get(method, ()))
    assert message.startswith(f"{method} raised ValueError(array([[0., 0., 0.], [0., 0., 0.]")


# -- one drafter after another -----------------------------------------------------------------------------


def assert_same_arrays(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_what_another_drafter_left_is_kept_for_it():
    left = speculator(Quiet(state={"x": np.arange(3)}), name="first").state()
    second = Quiet(state={"x": np.arange(5)})
    between = speculator(second, name="second")
    between.load_state(left)
    assert second.loaded is None
    first = Quiet()
    speculator(first, name="first").load_state(between.state())
    assert_same_arrays(first.loaded, {"x": np.arange(3)})
    assert_same_arrays({"x": between.state()["second/x"]}, {"x": np.arange(5)})


@NEEDS_PAPERS
def test_drafts_sampled_ahead_are_not_kept_by_those_who_do_not_run_ahead():
    run_ahead = speculator(Quiet(), ahead=True)
    run_ahead.idle.keep([(make_requests()[0], [3, 4], None)])
    assert len(run_ahead.state()["ahead_tokens"]) == 2
    without = speculator(Quiet())
    without.load_state(run_ahead.state())
    assert not any(name.startswith("ahead") for name in without.state())
    again = speculator(Quiet(), ahead=True)
    again.load_state(without.state())
    assert not len(again.state()["ahead_tokens"])


@pytest.mark.parametrize(
    ("earlier", "between", "later"),
    [
        ("histospec", None, "srt"),
        ("srt", "prompt_lookup", "suffix_decoding"),
        ("suffix_decoding", "quantized", "histospec"),
    ],
)
def test_history_passes_from_one_drafter_to_another(earlier, between, later):
    first = speculator(make_drafter(earlier), name=earlier)
    outcomes = [Outcome((1, 2), np.arange(5, 9 + i, dtype=np.int32), float(i)) for i in range(3)]
    first.learn([*outcomes, Outcome((3,), np.arange(70_000, 70_003, dtype=np.int32), 0.5)])
    state = first.state()
    if between is not None:
        silent = speculator(make_drafter(between), name=between)
        silent.load_state(state)
        state = silent.state()
    last = speculator(make_drafter(later), name=later)
    last.load_state(state)
    assert_same_arrays(only(last).history.state(), only(first).history.state())
    assert only(last).history.num_tokens == 4 + 5 + 6 + 3
    assert last.lengths.expected((1, 2)) == 5
