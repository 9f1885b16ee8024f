"""Strategies from a config."""

import pytest

from drafters.eagle.drafting import DraftStrategy
from rljax.engine.draft_tree import MAX_NODES
from rljax.errors import ConfigError
from rljax.speculation.strategies import Strategy, arm_name, parse_strategies

NAMES = ("eagle", "srt")
GOOD = {"drafter": "eagle", "depth": 4, "top_k": 4, "nodes": 15}


def chain(nodes, drafter="srt"):
    return Strategy(nodes, 1, nodes, drafter)


def test_a_strategy_is_what_a_head_can_draft():
    for depth in range(1, 9):
        for top_k in range(1, 6):
            for nodes in (1, top_k, top_k + 1, depth * top_k, top_k + (depth - 1) * top_k**2, MAX_NODES):
                for make in (lambda *n: DraftStrategy(*n), lambda *n: Strategy(*n, "eagle")):
                    if nodes <= min(top_k + (depth - 1) * top_k**2, MAX_NODES - 1):
                        make(depth, top_k, nodes)
                    else:
                        with pytest.raises(ValueError, match="nodes: "):
                            make(depth, top_k, nodes)


def test_strategies_of_a_config_keep_their_order_and_are_named():
    chains = {"drafter": "srt", "depth": 7, "top_k": 1, "nodes": 7}
    strategies = parse_strategies([chains, GOOD], NAMES, 15)
    assert strategies == (chain(7), Strategy(4, 4, 15, "eagle"))
    assert [str(strategy) for strategy in strategies] == ["srt 7/1/7", "eagle 4/4/15"]
    assert arm_name(strategies[1]) == "eagle 4/4/15" and arm_name(None) == "plain"
    mixed = chains | {"drafter": "srt+eagle", "nodes": 15}  # more than a chain of 7 has
    assert parse_strategies([mixed], NAMES, 15)[0].drafters == ("srt", "eagle")
    assert parse_strategies((), NAMES, 15) == ()


@pytest.mark.parametrize(
    "value, message",
    [
        ({"drafter": "egle"}, r"\.drafter: unknown drafter 'egle'; did you mean 'eagle'\? Known: eagle, srt"),
        ({"drafter": "srt+egle"}, r"\.drafter: unknown drafter 'egle'; did you mean 'eagle'\?"),
        ({"drafter": "srt+srt"}, r"\.drafter: srt\+srt names a drafter twice"),
        ({"drafter": None}, r"\.drafter: should be a drafter's name, got None; the plain step needs no"),
        ({"depht": 4}, r"\.depht: unknown key; did you mean 'depth'\? Known: depth, drafter, nodes, top_k"),
        ({"depth": "4"}, r"\.depth: should be a whole number, got '4'"),
        ({"top_k": True}, r"\.top_k: should be a whole number, got True"),
        ({"depth": 0}, r"\.depth: should be from 1 to 63, got 0"),
        ({"top_k": -1}, r"\.top_k: should be from 1 to 63, got -1"),
        ({"nodes": 0}, r"\.nodes: should be from 1 to 63, got 0"),
        ({"nodes": 16}, r"\.nodes: 16 is more than speculation\.max_drafts 15"),
        ({"top_k": 1}, r"\.nodes: 15 is more than the 4 that a tree of depth 4 and top_k 1 can have"),
    ],
)
def test_an_impossible_strategy_is_named(value, message):
    with pytest.raises(ConfigError, match=r"^speculation\.strategies\[1\]" + message):
        parse_strategies([{**GOOD, "nodes": 7}, {**GOOD, **value}], NAMES, 15)


def test_other_impossible_lists():
    for value in (None, "eagle", GOOD):
        with pytest.raises(ConfigError, match=r"^speculation\.strategies: should be a list such as"):
            parse_strategies(value, NAMES, 15)
    with pytest.raises(ConfigError, match=r"^speculation\.strategies\[0\]: should be a section of keys such"):
        parse_strategies(["eagle"], NAMES, 15)
    with pytest.raises(ConfigError, match=r"strategies\[2\]: is the same as speculation\.strategies\[0\]"):
        parse_strategies([GOOD, {**GOOD, "nodes": 3}, dict(GOOD)], NAMES, 15)
    for name in GOOD:
        rest = {key: value for key, value in GOOD.items() if key != name}
        with pytest.raises(ConfigError, match=rf"^speculation\.strategies\[0\]\.{name}: is missing"):
            parse_strategies([rest], NAMES, 15)
