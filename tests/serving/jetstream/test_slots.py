"""The engine by JetStream's calls: the tokens and logprobs of the scheduler, slot by slot."""

import uuid

import jax
import numpy as np
import pytest

from rljax.engine.buckets import Buckets
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.serving.jetstream.slots import SlotEngine
from tests.tiny_policy import EOS, make_engine

LONGEST = 128  # positions of the largest cache
PROMPTS = [(3, 9, 27), tuple(range(2, 42)), (8,)]
IDS = [uuid.UUID(int=(1 << 70) + i) for i in range(3)]


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture
def slots(engine):
    return SlotEngine(engine, slots=4, max_prompt_length=64, seed=7)


def padded(prompt):
    return np.pad(np.asarray(prompt, np.int32), (0, 64 - len(prompt)))


def expected_of(engine, params, prompt, *identities):
    """What the scheduler samples for requests of these identities."""
    requests = [
        Request(prompt, request_key(7, 3, *identity), LONGEST - len(prompt)) for identity in identities
    ]
    return Scheduler(engine, 4).run(params, requests)[0]


def identity(request_id, sample=0):
    return (2, request_id.int >> 64, request_id.int & (1 << 64) - 1, sample)


def decode_all(slots, params, state, into, steps=LONGEST):
    """Calls `generate` until nothing comes; `into` maps slots to (tokens, logprobs)."""
    for _ in range(steps):
        state, result = slots.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        assert result.samples_per_slot == 1 and result.data.dtype == np.int32
        came = False
        for slot, (tokens, logprobs) in into.items():
            got = result.get_result_at_slot(slot)
            assert got.tokens.shape == got.valid.shape == (1, 1)
            if got.valid[0, 0]:
                came = True
                tokens.append(int(got.tokens[0, 0]))
                logprobs.append(got.log_prob[0, 0] if got.log_prob is not None else None)
                assert got.lengths[0] == len(tokens)
        if not came:
            break
    return state


def assert_same(got, completion):
    np.testing.assert_array_equal(got[0], completion.response_ids)
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), completion.logprobs)


def test_samples_of_a_prompt(engine, params, slots):
    rng = jax.random.key(5)
    prefix, first = slots.prefill_multisampling(
        params=params, padded_tokens=padded(PROMPTS[0]), true_length=3, rng=rng, num_samples=3
    )
    assert first.samples_per_slot == 3
    got = first.get_result_at_slot(0)
    where = [3, 0, 2]
    into = {slot: ([int(got.tokens[i, 0])], [got.log_prob[i, 0]]) for i, slot in enumerate(where)}
    state = slots.bulk_insert(prefix, slots.init_decode_state(), where)
    state, result = slots.generate(params, state)
    several = result.get_result_at_slots(tuple(where))
    for i, slot in enumerate(where):
        into[slot][0].append(int(several.tokens[i, 0]))
        into[slot][1].append(several.log_prob[i, 0])
    decode_all(slots, params, state, into)
    words = np.asarray(jax.random.key_data(rng)).tolist()
    expected = expected_of(engine, params, PROMPTS[0], *((1, *words, i) for i in range(3)))
    for slot, completion in zip(where, expected, strict=True):
        assert_same(into[slot], completion)


def test_slots_get_the_schedulers_tokens_also_when_they_are_taken_again(engine, params, slots):
    """A freed slot is silent, and another request takes it while others decode."""

    def prefill(i):
        prefix, first = slots.prefill(
            params=params, padded_tokens=padded(PROMPTS[i]), true_length=len(PROMPTS[i]), request_id=IDS[i]
        )
        got = first.get_result_at_slot(0)
        assert got.lengths.tolist() == [1] and got.valid.tolist() == [[1]]
        return prefix, ([int(got.tokens[0, 0])], [got.log_prob[0, 0]])

    state, into = slots.init_decode_state(), {}
    for slot in (2, 1):  # the second one joins the first
        prefix, into[slot] = prefill(slot)
        state = slots.insert(prefix, state, slot, request_id=IDS[slot])
        state = decode_all(slots, params, state, into, steps=1)
    slots.free_resource(1)
    state = decode_all(slots, params, state, into, steps=1)
    assert [len(into[slot][0]) for slot in (1, 2)] == [2, 4]
    prefix, into[1] = prefill(0)
    slots.free_resource(1)  # of the request before: the one that takes the slot is not meant
    decode_all(slots, params, slots.insert(prefix, state, 1), into)
    for slot, i in ((1, 0), (2, 2)):
        assert_same(into[slot], expected_of(engine, params, PROMPTS[i], identity(IDS[i]))[0])


def test_a_response_that_its_first_token_ends(engine, params, slots):
    """For some request the first token is EOS: its slot stays idle."""
    ids = [uuid.UUID(int=number) for number in range(600)]
    requests = [Request((8,), request_key(7, 3, *identity(each)), 1) for each in ids]
    ended = [each.finish_reason == "eos" for each in Scheduler(engine, 4).run(params, requests)[0]]
    request_id = ids[ended.index(True)]
    prefix, first = slots.prefill(
        params=params, padded_tokens=padded((8,)), true_length=1, request_id=request_id
    )
    assert first.get_result_at_slot(0).tokens.tolist() == [[EOS]]
    state = slots.insert(prefix, slots.init_decode_state(), 0)
    _, result = slots.generate(params, state)
    assert result.get_result_at_slot(0).valid.tolist() == [[0]]


def test_penalties_count_the_first_token(params):
    sampling = SamplingParams(frequency_penalty=3.0)
    engine = make_engine(sampling, Buckets((4,), (LONGEST,)))
    slots = SlotEngine(engine, slots=4, max_prompt_length=64, seed=7)
    prefix, first = slots.prefill(
        params=params, padded_tokens=padded(PROMPTS[0]), true_length=3, request_id=IDS[0]
    )
    got = first.get_result_at_slot(0)
    into = {1: ([int(got.tokens[0, 0])], [got.log_prob[0, 0]])}
    decode_all(slots, params, slots.insert(prefix, slots.init_decode_state(), 1), into)
    assert_same(into[1], expected_of(engine, params, PROMPTS[0], identity(IDS[0]))[0])


def test_requests_without_an_identity_get_one_each(engine, params, slots):
    ask = lambda: slots.prefill(params=params, padded_tokens=padded((8,)), true_length=1)[0]  # noqa: E731
    keys = [np.asarray(ask().noise_keys).tolist() for _ in range(3)]
    assert keys == [[request_key(7, 3, 0, i, 0).tolist()] for i in range(3)]


def test_what_the_contract_offers_and_what_of_it_the_engine_does_not(params, engine, slots):
    prompt = {"params": params, "padded_tokens": padded((8,)), "true_length": 1}
    many = {"params": params, "padded_tokens": np.zeros(80, np.int32), "true_length": 80}
    for says, call, arguments in (
        ("sampler", slots.prefill, prompt | {"sampler": print}),
        ("sampler", slots.generate, {"params": params, "decode_state": None, "sampler": print}),
        ("existing_prefix", slots.prefill, prompt | {"existing_prefix": object()}),
        ("true_length", slots.prefill, many),
        ("num_samples", slots.prefill_multisampling, prompt | {"num_samples": 5}),
    ):
        with pytest.raises(ValueError, match=says):
            call(**arguments)
    prefix, _ = slots.prefill(**prompt)
    with pytest.raises(ValueError, match="slots"):
        slots.bulk_insert(prefix, slots.init_decode_state(), [0, 1])
    with pytest.raises(ValueError, match="max_prompt_length"):
        SlotEngine(engine, 4, LONGEST)
    assert slots.max_concurrent_decodes == 4 and slots.samples_per_slot == 1 and slots.mesh.size == 1
    assert slots.max_prefill_length == 64 and slots.colocated_cpus is None
    leaves = jax.device_put({"x": np.zeros(3)}, slots.get_prefix_destination_sharding())
    assert leaves["x"].shape == (3,)
