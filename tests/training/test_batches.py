"""Batches in the order of the problems: which weights they hold, and where they go back to."""

import weakref
from types import SimpleNamespace

from rljax.config import load_config
from rljax.training.batches import Batches
from rljax.training.run_state import RunState
from tests.training.tiny_run import write_config


class Weights:
    """Loaded weights."""


class Collector:
    """Begins groups, as without workers: what it has begun holds the weights."""

    def __init__(self):
        self.asked = []

    def begin(self, params, wanted):
        self.asked.append((wanted.step, wanted.indices, wanted.version))
        return SimpleNamespace(wanted=wanted, decoding=params)

    def finish(self, begun, on_progress):
        return [begun.wanted.indices], None, None


class Prompts:
    def next_problems(self, split, position, count):
        return list(range(position, position + count)), position + count


def make_batches(tmp_path, *overrides):
    """Batches with the state that they change and what they have asked for."""
    config, state = load_config(write_config(tmp_path), overrides), RunState(SimpleNamespace(params=None))
    engine, collector = SimpleNamespace(load_params=lambda params, copy: Weights()), Collector()
    return Batches(config, state, engine, Prompts(), collector), state, collector.asked


def test_an_update_finds_the_memory_of_the_rollouts_weights(tmp_path):
    batches, state, asked = make_batches(tmp_path)
    batches.begin(0)
    held = weakref.ref(state.versions[0])
    assert batches.finish(None)[0] == [[0, 1]]
    batches.begin(1)  # with dynamic sampling, under the same weights
    batches.finish(None)
    assert held() is not None
    assert batches.sampled_by() is None and held() is None
    assert asked == [(0, [0, 1], 0), (0, [2, 3], 0)]


def test_with_staleness_a_step_begins_the_next_and_a_failed_rollout_asks_again(tmp_path):
    batches, state, asked = make_batches(tmp_path, "rollout.staleness=1")
    place = batches.place()
    batches.begin(0)
    batches.go_back(place)
    assert (state.data_position, state.begun) == (0, {})
    batches.begin(0)
    batches.finish(None)
    assert list(batches.sampled_by()) == [0] and list(state.begun) == [1]
    state.step = 1
    batches.begin(0)
    batches.finish(None)
    assert list(batches.sampled_by()) == [0, 1]
    assert asked == [(0, [0, 1], 0), (1, [2, 3], 0)] * 2  # the last step begins no other
