"""What a checkpoint keeps of the drafters, and of what is known of them: all of it, and as it was."""

import dataclasses
import io

import numpy as np
import pytest

from drafters.registry import make_drafter, states_read
from rljax.speculation.idle_requests import make_idle_requests
from rljax.speculation.speculator import Speculator
from tests.speculation.speculators import CHEAP, FEW, learn, make_engine, roll_out
from tests.tiny_policy import CONFIG, HEAD, SLOTS, strategy_choice

EAGLE = HEAD | {"slices": 1, "train_below": 0}


OF_EVERY_RUN = {"lengths_prompts", "lengths_sizes", "lengths_counts", "lengths_tokens"}
KEPT = {
    "expected": (
        strategy_choice("expected"),
        ("srt", "eagle"),
        {
            "calibration_of_srt",
            "calibration_of_eagle",
            "chains_of_eagle",
            "eagle/step",
            "eagle/train.params.layer.q",
            "eagle/train.optimizer_state",
            "eagle/train.updates",
            "eagle/buffer.tokens",
            "eagle/buffer.states",
            "eagle/passes",
            "history/",
        },
    ),
    "mixed": (
        strategy_choice("expected", mix=True),
        ("srt", "suffix_decoding"),
        {"agreement_gained", "agreement_squares", "calibration_of_suffix_decoding"},
    ),
}


def make_speculator(choice, names):
    drafters = {each: make_drafter(each, **(EAGLE if each == "eagle" else {})) for each in names}
    engine, idle = make_engine(states_read(drafters, CONFIG), FEW), make_idle_requests(choice.config)
    return Speculator(engine, drafters, SLOTS, idle, times=CHEAP, strategies=choice)


def through_a_file(state):
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert (array.dtype, array.shape) == (other[key].dtype, other[key].shape), key
        np.testing.assert_array_equal(array, other[key], err_msg=key)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_lost_on_the_way_through_a_checkpoint(params, requests, name):
    check_checkpoint(params, requests, *KEPT[name])


def check_checkpoint(params, requests, choice, names, kept):
    """What is kept is that, and what was handed out does not change when the rollouts go on: it is written
    meanwhile.
    """
    speculator = make_speculator(choice, names)
    fresh = through_a_file(make_speculator(choice, names).state())
    for step in range(2):
        requests = [dataclasses.replace(each, step=step) for each in requests]
        completions, _ = roll_out(speculator, params, requests)
        learn(speculator, requests, completions)
    if choice.config.fills_idle_slots:
        speculator.idle.keep([(requests[0], [5, 6, 7], None)])
    state = speculator.state()
    saved = through_a_file(state)
    learned = {key for key in saved if key not in fresh or not np.array_equal(saved[key], fresh[key])}
    for name in kept | OF_EVERY_RUN:
        assert any(key.startswith(name) for key in learned), name
    again = make_speculator(choice, names)
    again.load_state(dict(saved))
    assert_same(through_a_file(again.state()), saved)
    for each in (speculator, again):  # what the last rollout has to tell is told when the next begins
        each.manager.begin(True, 2)
    assert_same(again.manager.state(), speculator.manager.state())

    completions, _ = roll_out(speculator, params, requests)
    learn(speculator, requests, completions)
    assert_same(through_a_file(state), saved)


def test_the_state_is_taken_up_by_a_run_with_other_drafters(params, requests):
    """What only others know waits for them or is dropped; what is left is as in a fresh run."""
    speculator = make_speculator(strategy_choice("expected"), ("srt", "quantized"))
    completions, _ = roll_out(speculator, params, requests)
    learn(speculator, requests, completions)
    other = make_speculator(*KEPT["mixed"][:2])
    other.load_state(through_a_file(speculator.state()))
    state = other.state()
    assert np.array_equal(state["calibration_of_srt"], speculator.state()["calibration_of_srt"])
    assert not any(key.endswith("_of_quantized") for key in state)
    assert not state["calibration_of_suffix_decoding"].any()
