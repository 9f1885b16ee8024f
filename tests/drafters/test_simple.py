"""Drafters of one method, and drafters by import path: in rollouts with the tokens of plain decoding."""

import re
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from drafters.base import DraftRequest, Queries, Sampled
from drafters.registry import make_drafter, make_drafters, rehearse_drafters
from drafters.simple import SimpleDrafterAdapter
from rljax.config.speculation import SpeculationConfig
from rljax.errors import ConfigError, DrafterError
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculator import Speculator
from tests.configs import table
from tests.tiny_policy import SLOTS, CheapTimes, assert_same, make_engine

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        name = f"drafters_of_a_test_{abs(hash((source, str(tmp_path))))}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    return write


# -- in a rollout ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def speculate(engine, params, requests, drafters):
    speculator = Speculator(engine, drafters, SLOTS, times=CheapTimes())
    return Scheduler(engine, SLOTS, speculator=speculator).run(params, requests)


def test_the_drafter_of_the_page_runs(engine, params, requests, expected, module):
    (source, *_) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    config = SpeculationConfig(drafter=f"{module(source)}:LastOccurrence", args={"match": 1})
    rehearse_drafters(config)
    completions, statistics = speculate(engine, params, requests, make_drafters(config))
    assert_same(completions, expected)
    assert 0 < statistics.accepted < statistics.drafted and not statistics.unusable


def saying(tokens):
    """A drafter that always proposes these."""
    return {"mine": SimpleDrafterAdapter(types.SimpleNamespace(propose=lambda *_: tokens))}


@pytest.mark.parametrize("tokens", [None, [1.5], [[1, 2]], "12", [[1], [2, 3]], [True]], ids=str)
def test_anything_else_than_tokens_stops_the_run(engine, params, requests, tokens):
    kind = type(tokens).__name__
    message = f"speculation.drafter mine: propose returned {kind}.*, expected a list of tokens"
    with pytest.raises(DrafterError, match=message):
        speculate(engine, params, requests, saying(tokens))


def test_tokens_outside_the_vocabulary_are_left_out(engine, params, requests, expected):
    completions, statistics = speculate(engine, params, requests, saying([2**40, 3]))
    assert_same(completions, expected)
    assert statistics.unusable > 0 == statistics.drafted


# -- the adapter -------------------------------------------------------------------------------------------


def test_every_request_has_its_tokens_and_its_budget():
    seen = []

    class Recording:
        def propose(self, tokens, limit):
            assert tokens.dtype == np.int32 and not tokens.flags.writeable
            seen.append((tokens.tolist(), limit))
            return tokens[::-1]  # more than asked for

    drafter = SimpleDrafterAdapter(Recording())
    drafter.begin([DraftRequest((5, 6), None), DraftRequest((7,), None)])
    zeros, ended = np.zeros(2, np.int32), np.zeros(2, bool)
    for step in range(5):
        tokens = np.asarray([[10 + step, 20 + step], [30 + step, 0]], np.int32)
        drafter.observe(Sampled(np.asarray([0, 1]), tokens, np.asarray([2, 1]), zeros, zeros, ended))
    budgets = np.asarray([3, 0], np.int32)
    drafts = drafter.propose(Queries(np.asarray([1, 0]), np.asarray([6, 12]), budgets, 4))
    assert seen == [([7, 30, 31, 32, 33, 34], 3), ([5, 6, 10, 20, 11, 21, 12, 22, 13, 23, 14, 24], 0)]
    assert drafts.counts.tolist() == [3, 0]
    assert drafts.tokens[0].tolist() == [34, 33, 32, 0] and drafts.parents[0].tolist() == [-1, 0, 1, 2]
    assert (drafter.state(), drafter.metrics()) == ({}, {})


# -- by import path ----------------------------------------------------------------------------------------


SOURCE = """
import numpy as np
from drafters.base import Drafter, Drafts

class Small:
    def __init__(self, width: int):
        self.width = width
    def propose(self, tokens, limit):
        return []

class Large(Drafter):
    def begin(self, requests): ...
    def propose(self, queries): ...
    def observe(self, sampled): ...

class Partial:
    def begin(self, requests): ...
    def propose(self, queries): ...
    def observe(self, sampled): ...

class Silent:
    pass

class Raising:
    def __init__(self):
        raise RuntimeError("no\\nidea")

number = 3
"""


def test_tiers_by_import_path(module):
    name = module(SOURCE)
    assert isinstance(make_drafter(f"{name}:Small", width=3), SimpleDrafterAdapter)
    large = make_drafter(f"{name}:Large")
    assert type(large).__name__ == "Large" and (large.state(), large.metrics()) == ({}, {})
    others = make_drafters(SpeculationConfig(drafter="srt", others={f"{name}:Small": {"width": 2}}))
    assert list(others) == ["srt", f"{name}:Small"]


WRONG = r"""
HERE: -> {} -> write it as module:name, not '.*:'
:Small -> {} -> write it as module:name, not ':Small'
./no_file.py:Small -> {} -> .*: there is no file \./no_file\.py in
no_such_module:Small -> {} -> no_such_module:Small: importing no_such_module raised M
HERE:Smal -> {} -> .*:Smal: .* has no Smal
HERE:Small -> {} -> .* cannot be called with its args: missing .* 'width'
HERE:Small -> {width: 1, depth: 2} -> .* unexpected keyword .* 'depth'
HERE:number -> {} -> .*:number: is a int, not a class or a function
HERE:Raising -> {} -> .*:Raising: calling it raised RuntimeError
HERE:Silent -> {} -> .*:Silent: Silent has no method propose
HERE:Partial -> {} -> .*Partial has more methods than propose; derive it from drafters\.base\.Drafter
"""


@pytest.mark.parametrize(("path", "args", "says"), table(WRONG))
def test_a_drafter_that_cannot_be_loaded_is_one_line(path, args, says, module):
    with pytest.raises(ConfigError, match=rf"^speculation\.drafter: {says}") as error:
        make_drafter(path.replace("HERE", module(SOURCE)), **yaml.safe_load(args))
    assert "\n" not in str(error.value)
