"""Sampling settings by request: a request has the bits that it has where all have its settings, in programs
with these settings inside, whatever else is decoded beside it, drafted or not.
"""

import dataclasses

import jax
import numpy as np
import pytest

from drafters.registry import make_drafter
from rljax.engine.appending import Continuation
from rljax.engine.buckets import Buckets
from rljax.engine.host_sync import Assignment
from rljax.errors import ConfigError
from rljax.numerics.rows import Numerics
from rljax.rollout.collector import Scheduler
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import open_loop, open_slots
from rljax.sampling.distribution import SamplingParams
from rljax.speculation.speculator import Speculator
from tests import tiny_policy
from tests.engines import stored_pool
from tests.tiny_policy import CONFIG, EOS, SLOTS, CheapTimes, assert_same, make_params, make_requests

ENGINE = SamplingParams(temperature=1.2, top_p=0.95)
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(0.9, 20, 0.7, 0.02),
    None,  # the engine's
    SamplingParams(temperature=0.6),
]
BUCKETS = Buckets((2, SLOTS), (128,), (16,), 3)
POOL = stored_pool()


def make_engine(dtype, sampling=ENGINE, buckets=BUCKETS, per_slot=True, **more):
    more |= {"numerics": Numerics(compute_dtype=dtype), "per_slot_sampling": per_slot, "pool": POOL}
    return tiny_policy.make_engine(sampling, buckets, **more)


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def engine(dtype):
    return make_engine(dtype)


@pytest.fixture(scope="module")
def params(engine):
    return engine.load_params(make_params())


@pytest.fixture(scope="module")
def requests():
    """Prompts in groups of three, the settings of neighbours all different."""
    return [
        dataclasses.replace(request, sampling=SETTINGS[i % len(SETTINGS)])
        for i, request in enumerate(make_requests()[: SLOTS * len(SETTINGS)])
    ]


@pytest.fixture(scope="module")
def expected(dtype, params, requests):
    """Each request decoded beside others of its settings, by programs with these settings inside."""
    responses = [LiveResponse(request) for request in requests]
    prefilling = make_engine(dtype, per_slot=False)
    for settings in SETTINGS:
        engine = make_engine(dtype, settings or ENGINE, per_slot=False)
        same = [response for response in responses if response.request.sampling == settings]
        prefix = prefilling.prefill(params, [each.request.prompt_ids for each in same])
        placed = [
            Assignment(slot, slot, each.request.noise_key, each.remaining) for slot, each in enumerate(same)
        ]
        state, active = engine.bulk_insert(prefix, engine.init_state(SLOTS, 128), placed), True
        while active:
            state, result = engine.generate(params, state)
            active = result.active.any()
            for slot, response in enumerate(same):
                response.tokens += [token for token in result.tokens[slot].tolist() if token >= 0]
                response.logprobs += result.logprobs[slot][result.tokens[slot] >= 0].tolist()
    for response in responses:
        response.use_version(0)
        response.ending = "eos" if response.tokens[-1] == EOS else "length"
    return [response.completion(False) for response in responses]


def test_a_mix_has_the_bits_of_programs_with_the_settings_inside(engine, params, requests, expected):
    """Requests enter and leave slots, which are compacted."""
    assert_same(Scheduler(engine, SLOTS).run(params, requests)[0], expected)
    assert "compact" in {key[0] for key in POOL._programs}
    assert len({tuple(each.response_ids.tolist()) for each in expected}) > 12


@pytest.mark.parametrize(
    ("dtype", "drafter"),
    [pytest.param("float32", "quantized", marks=pytest.mark.long), ("bfloat16", "srt")],
    indirect=["dtype"],
)
def test_drafts_change_no_token_of_a_mix(engine, params, requests, expected, drafter):
    """The drafters draft under the engine's settings, whatever those of the requests."""
    engine = make_engine(engine.numerics.compute_dtype, buckets=Buckets((SLOTS,), (128,), (16,), 3))
    with Speculator(engine, {drafter: make_drafter(drafter)}, SLOTS, times=CheapTimes()) as speculator:
        completions, statistics = Scheduler(engine, SLOTS, None, speculator).run(params, requests)
    assert_same(completions, expected)
    assert statistics.accepted > (100 if drafter == "quantized" else 20)


def test_every_move_of_a_slot_takes_its_settings_along():
    engine = make_engine("bfloat16", buckets=Buckets((2, SLOTS), (128, 192)))
    params = engine.load_params(make_params())
    shown = lambda state, slots: [  # noqa: E731
        [np.asarray(leaf)[slot].tolist() for leaf in jax.tree.leaves(state.sampling)] for slot in slots
    ]
    prefix = engine.prefill(params, [[2, 3, 4]])
    keys = np.zeros(2, np.uint32)
    placed = [Assignment(0, slot, keys, 50, settings) for slot, settings in enumerate(SETTINGS)]
    state = engine.bulk_insert(prefix, engine.init_state(SLOTS, 128), placed)
    before = shown(state, range(SLOTS))
    assert len({str(each) for each in before}) == SLOTS
    state, _ = engine.generate(params, state, 2)
    state = engine.append(params, state, [Continuation(1, 3, [5, 6, 7], 9)])
    assert shown(state, range(SLOTS)) == before
    state = engine.compact(state, [3, 1])
    assert shown(state, [0, 1]) == [before[3], before[1]]
    state = engine.widen(engine.grow(state), SLOTS)
    assert shown(state, [0, 1]) == [before[3], before[1]]
    state = engine.bulk_insert(prefix, state, [Assignment(0, 2, keys, 50)])  # the engine's own
    assert shown(state, [2]) == shown(engine.init_state(SLOTS, 128), [0])


def test_without_settings_by_request_the_state_has_no_new_arrays():
    state = make_engine("float32", per_slot=False).state_shapes(SLOTS, 128)
    assert state.sampling is None
    assert len(jax.tree.leaves(state)) == 2 * CONFIG.num_layers + 5


def test_what_cannot_be_chosen_by_request_is_refused(params, requests):
    for rule in ("rejection", "target_only"):  # which sample all requests alike
        with pytest.raises(ConfigError, match=rf"^engine\.verification: {rule} .* set coupled"):
            make_engine("float32", verification=rule)
    for per_slot, settings, said in (
        (False, SamplingParams(0.5), "per_slot_sampling"),
        (True, SamplingParams(presence_penalty=1.0), "penalties"),
        (True, SamplingParams(1e-40), "temperature"),
        (True, SamplingParams(1e40), "temperature"),
        (True, SamplingParams(top_p=1e-42), "top_p"),
    ):
        loop = open_loop(open_slots(make_engine("float32", per_slot=per_slot), params), SLOTS)
        with pytest.raises(ValueError, match=said):
            loop.submit([LiveResponse(dataclasses.replace(requests[0], sampling=settings))])
        assert not loop.waiting
