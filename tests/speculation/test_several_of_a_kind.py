"""Several drafters of a kind, through the config: the tokens are those of plain decoding, and both draft."""

import dataclasses
import itertools

import pytest

from drafters.registry import make_drafters, rehearse_drafters, states_read
from rljax.config.speculation import SpeculationConfig
from rljax.errors import ConfigError
from rljax.models.huggingface import save_model
from rljax.models.transformer import init_params
from rljax.rollout.collector import Scheduler
from rljax.speculation.speculator import Speculator
from tests.speculation.speculators import FEW, make_engine
from tests.tiny_policy import CONFIG, SLOTS, CheapTimes, assert_same, make_requests

HEAD = {"kind": "eagle", "train": False, "depths": [3]}


def scheduler_of(drafters):
    engine = make_engine(states_read(drafters, CONFIG), FEW)
    speculator = Speculator(engine, drafters, SLOTS, times=CheapTimes()) if drafters else None
    return Scheduler(engine, SLOTS, None, speculator, False)


@pytest.mark.default_cases("small_model")
@pytest.mark.parametrize("kind", ["small_model", "eagle", "quantized"])
def test_the_tokens_are_those_of_plain_decoding(params, kind, tmp_path):
    requests = make_requests((3, 20, 8), (20, 16, 7))
    if kind == "eagle":
        others = {"one": {**HEAD, "seed": 1}, "two": {**HEAD, "depths": [1], "seed": 2}}
    elif kind == "small_model":
        save_model(tmp_path / "same", CONFIG, params, "float32")
        smaller = dataclasses.replace(CONFIG, hidden_size=32, num_heads=2, num_kv_heads=1)
        save_model(tmp_path / "smaller", smaller, init_params(smaller, 1), "float32")
        paths = {"one": tmp_path / "same", "two": tmp_path / "smaller"}
        others = {name: {"kind": kind, "path": str(path)} for name, path in paths.items()}
    else:
        others = {"one": {"kind": kind, "bits": 4}, "two": {"kind": kind, "bits": 8}}
    config = SpeculationConfig(drafter="srt", others=others)
    assert config.drafters == ["srt", "one", "two"]
    drafters = make_drafters(config)
    assert list(drafters) == config.drafters and type(drafters["one"]) is type(drafters["two"])
    expected, _ = scheduler_of({}).run(params, requests)
    scheduler = scheduler_of(drafters)
    drafted = dict.fromkeys(("one", "two"), 0)
    for proposer in scheduler.speculator.proposers:
        if proposer.name in drafted:
            turns = itertools.cycle((0, 1) if proposer.name == "one" else (1, 0))

            def in_turn(*asked, name=proposer.name, rate=proposer.expected_rate, turns=turns):
                expected = next(turns) * rate(*asked)
                drafted[name] += expected > 0
                return expected

            proposer.expected_rate = in_turn
    for _ in range(2):
        completions, statistics = scheduler.run(params, requests)
        assert_same(completions, expected)
    assert statistics.drafted > 0 and all(drafted.values())
    metrics = scheduler.speculator.metrics(statistics)
    if kind == "small_model":  # the others report nothing before they are trained
        assert {"speculation/one/caught_up", "speculation/two/caught_up"} <= metrics.keys()


def test_the_kind_is_the_name_by_default():
    config = SpeculationConfig(drafter="srt", others={"quantized": {"bits": 4}, "q8": {"kind": "quantized"}})
    assert config.kinds == {"srt": "srt", "quantized": "quantized", "q8": "quantized"}
    assert config.arguments == {"srt": {}, "quantized": {"bits": 4}, "q8": {}}
    rehearse_drafters(SpeculationConfig(drafter="quantized", others={"memory": {"kind": "srt"}}))


@pytest.mark.parametrize(
    ("drafter", "others", "message"),
    [
        ("srt", {"tiny": {"kind": "smal_model"}}, r"others\.tiny\.kind: .*; did you mean 'small_model'\?"),
        ("srt", {"quantised": {}}, r"speculation\.others: .*'quantised'; did you mean 'quantized'\?"),
        ("srt", {"tiny": {"kind": "quantized", "bit": 4}}, r"others\.tiny\.bit: .*no such argument"),
        ("srt", {"tiny": {"kind": 3}}, "others.tiny.kind: should be"),
        ("srt", {"a+b": {"kind": "srt"}}, "is no name"),
        ("eagle", {"old": {"kind": "eagle", "variant": "eagle"}}, r"old reads .* layers \[\], but eagle"),
    ],
)
def test_what_cannot_be_is_refused(drafter, others, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        states_read(make_drafters(SpeculationConfig(drafter=drafter, others=others)), CONFIG)
