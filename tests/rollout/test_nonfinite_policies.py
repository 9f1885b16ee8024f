"""A policy that is no numbers is refused: what is not finite never stands in a cache that is read."""

import jax
import jax.numpy as jnp
import pytest

from drafters.registry import make_drafter
from rljax.engine.buckets import Buckets
from rljax.errors import PolicyError
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import FixedTimes, by_rows, make_engine, make_params, make_requests


@pytest.fixture(scope="module")
def engine():
    return make_engine(buckets=Buckets((2,), (128,), (16,), 7))


def changed(name, change):
    """The policy with one entry of its first layer's `name` changed."""
    params = make_params()
    layer = params["layers"][0]
    entry = (0,) * layer[name].ndim
    return params | {"layers": [layer | {name: layer[name].at[entry].apply(change)}]}


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("q", float("nan"), "float32"),
        ("q_norm", float("inf"), "float32"),
        ("down", -float("inf"), "bfloat16"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(engine, name, value, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), changed(name, lambda _: jnp.float32(value)))
    with pytest.raises(PolicyError, match=rf"^policy: layers\.0\.{name} holds NaN or infinity; [^\n]*$"):
        engine.load_params(params)


@pytest.mark.parametrize("drafter", [None, "srt"])
def test_what_overflows_ends_the_rollout(engine, drafter):
    """Finite weights, values that are not."""
    params = make_params()
    layer = params["layers"][0]
    params |= {"layers": [layer | {"v": layer["v"] * 1e38, "o": layer["o"] * 1e38}]}
    params = engine.load_params(params)
    speculator = None
    if drafter is not None:
        times, choice = FixedTimes({0: 1.0, 16: 1.0}), by_rows(lambda *_: 16)
        speculator = Speculator(engine, {drafter: make_drafter(drafter)}, 2, times=times, strategies=choice)
    requests = make_requests(lengths=(3, 20), limits=(20, 20))
    message = "^policy: sampled a token with a log-probability that is not finite"
    with pytest.raises(PolicyError, match=message):
        Scheduler(engine, 2, None, speculator).run(params, requests)
