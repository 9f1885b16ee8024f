"""What stands in the place of a speculator has all that is asked of one, and keeps what others learned."""

import inspect
import types

import numpy as np

from rljax.requests import DecodeStatistics
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_it_can_be_asked_whatever_a_speculator_can():
    assert public(Speculator) <= public(NoDrafts) | vars(NoDrafts()).keys()
    for name in public(Speculator):
        method, here = getattr(Speculator, name), getattr(NoDrafts, name)
        if inspect.isfunction(method):
            inspect.signature(here).bind(*inspect.signature(method).parameters)


def test_the_state_of_drafters_of_other_runs_is_kept_for_checkpoints_alone():
    none, learned = NoDrafts(), {"srt/tokens": np.arange(3)}
    assert none.state() == {}
    none.load_state(learned)
    assert none.state() == learned and none.state(to_share=True) == none.weights() == {}
    assert none.metrics(DecodeStatistics()) == {} and none.decisions.take() == []


def test_lengths_are_learned_from_every_rollout():
    none, prompt = NoDrafts(), types.SimpleNamespace(prompt_ids=(1, 2))
    none.learn_lengths([prompt], [types.SimpleNamespace(response_ids=np.arange(7))])
    assert none.lengths.expected((1, 2)) == 7 and not none.keeps_lengths
