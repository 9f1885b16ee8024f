"""Drafters on the device that are compiled while responses are decoded: the same tokens, early or late."""

import pytest

from drafters.registry import make_drafter, states_read
from rljax.engine.background import CompilerThread
from rljax.engine.buckets import Buckets
from rljax.engine.plain_programs import PlainPrograms
from rljax.engine.shapes import Shapes
from rljax.models.huggingface import save_model
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculator import Speculator
from rljax.speculation.strategies import Strategy
from tests.tiny_policy import (
    CONFIG,
    HEAD,
    SLOTS,
    CheapTimes,
    assert_same,
    make_engine,
    make_params,
    outcomes,
    strategy_choice,
)

BUCKETS = Buckets((SLOTS,), (128,), (16,), 7)
SHRINKING = Buckets((2, SLOTS), (128,), (16,), 7)
NAMES = ["quantized", "eagle", "small_model"]


def speculator_of(name, params, requests, directory, buckets=BUCKETS, **settings):
    """A speculator whose drafter, verifying passes and plain programs are compiled in one thread."""
    args = HEAD if name == "eagle" else {}
    if name == "small_model":
        save_model(directory, CONFIG, make_params(1), "float32")
        args = {"path": str(directory)}
    drafters = {name: make_drafter(name, **args)}
    engine = make_engine(buckets=buckets, hidden_layers=states_read(drafters, CONFIG))
    speculator = Speculator(engine, drafters, SLOTS, times=CheapTimes(), **settings)
    prompts = [len(prompt) for prompt in dict.fromkeys(request.prompt_ids for request in requests)]
    thread = CompilerThread(buckets, (SLOTS, 128))
    shapes = Shapes(buckets, SLOTS, 64, 128, first_prompts=prompts)
    engine.background = PlainPrograms(engine, params, thread, shapes)
    speculator.warm_up_in_background(params, SLOTS, 64, False, prompts, 128, thread)
    if name == "eagle":
        drafters[name]._budget.allows = lambda: True  # however slow this machine is
    return speculator


def roll_out(speculator, params, requests):
    completions, statistics = Scheduler(speculator.engine, SLOTS, None, speculator).run(params, requests)
    speculator.learn(outcomes(requests, completions))
    return completions, statistics


def compilations(speculator):
    """Programs that were compiled by the thread that decodes."""
    return len(speculator.engine.pool) - speculator.engine.pool.background_programs


@pytest.mark.default_cases("quantized")
@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_joins_when_it_is_compiled(params, requests, expected, tmp_path, held_back, name):
    with speculator_of(name, params, requests, tmp_path) as speculator:
        compiled = compilations(speculator)
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.verified == statistics.drafted == 0
        assert compilations(speculator) == compiled and speculator.engine.pool.background_programs == 0
        held_back.set()
        speculator.decoder.compiler.wait()
        later = speculator.engine.pool.background_programs
        for _ in range(2):  # a head has learned before the second one
            completions, statistics = roll_out(speculator, params, requests)
            assert_same(completions, expected)
            assert statistics.verified > 0 and statistics.drafted > 0
        assert compilations(speculator) == compiled and speculator.engine.pool.background_programs == later
        if name == "eagle":
            assert speculator.metrics(statistics)["speculation/head/updates"] == 4


def test_a_follower_leaves_where_its_programs_are_missing(params, requests, expected, tmp_path):
    """It is not compiled for the smaller batch, and drafts again in the next rollout."""
    name = "small_model"
    with speculator_of(name, params, requests, tmp_path, buckets=SHRINKING) as speculator:
        speculator.decoder.compiler.wait()
        slots, (proposer,), followed = speculator.slots, speculator.proposers, []
        is_compiled = slots.is_compiled[name]
        slots.is_compiled[name] = lambda batch: batch > 2 and is_compiled(batch)
        propose = proposer.propose

        def noting(state, *args):
            followed.append((state.batch, name in slots.active))
            return propose(state, *args)

        proposer.propose = noting
        for _ in range(2):
            completions, statistics = roll_out(speculator, params, requests)
            assert_same(completions, expected)
            assert statistics.drafted > 0 and not slots.active
        assert (4, True) in followed and not any(batch == 2 and active for batch, active in followed)


def test_other_managers_wait_for_their_drafters(params, requests, expected, tmp_path):
    """They would take a drafter that is not ready for one that has nothing to propose."""
    settings = {"strategies": strategy_choice("fixed", Strategy(3, 1, 3, "quantized"))}
    with speculator_of("quantized", params, requests, tmp_path, **settings) as speculator:
        (proposer,) = speculator.proposers
        speculator.decoder.compiler.wait()
        asked, choose = [], speculator.manager.choose

        def noting(state, active, statistics):
            asked.append(state.batch)
            return choose(state, active, statistics)

        speculator.manager.choose = noting
        is_ready, proposer.is_ready = proposer.is_ready, lambda shape: False
        completions, statistics = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert statistics.verified == 0 and not asked
        proposer.is_ready = is_ready
        completions, _ = roll_out(speculator, params, requests)
        assert_same(completions, expected)
        assert asked
