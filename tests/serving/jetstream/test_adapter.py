"""The adapter for google-jetstream: through its abstract class, and through its orchestrator.

The package wants TensorFlow, by way of seqio, so it is no part of the dev extra; docs/serving.md says how to
install it without. Where it is missing, a stand-in with the abstract classes of its 0.3.0 takes its place.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax.assembly.saved_policy import load_saved_policy
from rljax.errors import ConfigError
from rljax.requests import Request
from rljax.rollout.collector import Scheduler
from rljax.sampling.noise import request_key
from rljax.serving.policy import Options, open_policy
from tests.serving.jetstream import jetstream_stand_in
from tests.serving.jetstream.jetstream_package import make_importable, missing
from tests.serving.tiny_server import make_run

needs_jetstream = pytest.mark.skipif(
    bool(missing()),
    reason=f"needs {', '.join(missing())}, see docs/serving.md",
)
PROMPTS = ("47a5b8=", "12c3=", "9d8e7=", "1f2=", "33g4=", "8h8=")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("jetstream"))


@pytest.fixture(scope="module")
def served(run):
    return open_policy(run, Options(slots=4), lambda line: None, compile_first=False)


@pytest.fixture
def jetstream(monkeypatch):
    """(`jetstream.engine.engine_api`, `rljax.serving.jetstream.adapter`) with the package or the stand-in."""
    if missing():
        for name, module in jetstream_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        make_importable()
    monkeypatch.delitem(sys.modules, "rljax.serving.jetstream.adapter", raising=False)
    adapter = importlib.import_module("rljax.serving.jetstream.adapter")
    yield sys.modules["jetstream.engine.engine_api"], adapter
    sys.modules.pop("rljax.serving.jetstream.adapter", None)


def expected_tokens(served, prompts):
    """What the scheduler samples for the orchestrator's requests of these prompts, without EOS."""
    encoded = (tuple(served.tokenizer.encode(prompt)) for prompt in prompts)
    requests = [
        Request(prompt, request_key(3, 3, 0, number, 0), served.max_tokens)
        for number, prompt in enumerate(encoded)
    ]
    completions, _ = Scheduler(served.worker.engine, 4).run(served.worker.params, requests)
    return [each.response_ids.tolist()[: -1 if each.finish_reason == "eos" else None] for each in completions]


def test_through_the_abstract_class(served, run, jetstream):
    engine_api, adapter = jetstream
    worker = served.worker
    engine = adapter.JetStreamEngine(worker.engine, served.tokenizer, 4, 64, seed=3)
    assert isinstance(engine, engine_api.Engine)
    metadata = engine.get_tokenizer()
    assert metadata.path == str(served.tokenizer.directory)
    tokenizer = engine.build_tokenizer(metadata)
    params, state = engine.load_params(load_saved_policy(run).policy.params), engine.init_decode_state()
    got = {}
    for slot, prompt in enumerate(PROMPTS[:3]):
        padded, length = tokenizer.encode(prompt, is_bos=True, max_prefill_length=engine.max_prefill_length)
        prefix = engine.prefill(params=params, padded_tokens=padded, true_length=length)
        got[slot] = []
        if adapter.FIRST_TOKEN:
            prefix, first = prefix
            assert isinstance(first, engine_api.ResultTokens)
            got[slot].append(int(first.get_result_at_slot(0).tokens[0, 0]))
        state = engine.insert(prefix=prefix, decode_state=state, slot=slot)
        engine.free_resource(slot)  # of the request before, which JetStream says when the next may be there
    for _ in range(served.max_tokens - adapter.FIRST_TOKEN):
        state, result = engine.generate(params, state)
        assert isinstance(result, engine_api.ResultTokens)
        result = result.convert_to_numpy()
        for slot, tokens in got.items():
            slot_tokens = result.get_result_at_slot(slot)
            if slot_tokens.valid[0, 0]:
                tokens.append(int(slot_tokens.tokens[0, 0]))
                assert slot_tokens.lengths[0] == len(tokens) and np.isfinite(result.log_prob[slot, 0])
    tokens = [[token for token in each if token not in tokenizer.stop_tokens] for each in got.values()]
    assert tokens == expected_tokens(served, PROMPTS[:3])
    assert tokenizer.decode(got[0]) == served.tokenizer.decode(got[0], skip_special_tokens=True)
    assert {tokenizer.eos_id} == tokenizer.stop_tokens and tokenizer.bos_id == tokenizer.eos_id


def test_no_text_is_an_error(served, jetstream):
    """It would end JetStream's process: a text that is too long loses its beginning, an empty one is BOS."""
    engine = jetstream[1].JetStreamEngine(served.worker.engine, served.tokenizer, 4, 64)
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    long = "7a" * 300
    for most in (64, 16, None):
        padded, length = tokenizer.encode(long, max_prefill_length=most)
        assert padded[:length].tolist() == served.tokenizer.encode(long)[-(most or 64) :]
    padded, length = tokenizer.encode("", max_prefill_length=64)
    assert padded[:length].tolist() == [tokenizer.bos_id]


def test_the_adapter_takes_what_jetstream_gives(jetstream):
    """Every argument of every abstract method, by its name."""
    _, adapter = jetstream
    demanded = jetstream_stand_in.Engine.__abstractmethods__
    for name in demanded:
        if not isinstance(vars(jetstream_stand_in.Engine)[name], property):
            parameters, ours = (
                inspect.signature(getattr(kind, name)).parameters
                for kind in (jetstream_stand_in.Engine, adapter.JetStreamEngine)
            )
            positional = [parameter for parameter in parameters if parameter not in ("args", "kwargs")]
            assert set(positional) <= set(ours), name


@needs_jetstream
def test_the_stand_in_demands_what_jetstream_demands(jetstream):
    """And more, where the installed one is older than 0.3.0."""
    from jetstream.engine import tokenizer_api

    for real, ours in (
        (jetstream[0].Engine, jetstream_stand_in.Engine),
        (tokenizer_api.Tokenizer, jetstream_stand_in.Tokenizer),
    ):
        assert real.__abstractmethods__ <= ours.__abstractmethods__
        if "prefill_chunk_size" in jetstream[0].Engine.__abstractmethods__:
            assert real.__abstractmethods__ == ours.__abstractmethods__
    assert jetstream[0].ResultTokens.__dataclass_fields__.keys() <= (
        jetstream_stand_in.ResultTokens.__dataclass_fields__.keys()
    )


@needs_jetstream
def test_through_jetstreams_orchestrator(served, run):
    """In a process of its own, as importing it changes logging; more prompts than there are slots."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.serving.jetstream.drive_jetstream", str(run), *PROMPTS],
        cwd=Path(__file__).parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    answers = {answer["prompt"]: answer for answer in map(json.loads, process.stdout.splitlines())}
    # Requests are prefilled in the order in which they were asked.
    assert [answers[prompt]["tokens"] for prompt in PROMPTS] == expected_tokens(served, PROMPTS)


def test_without_the_package_there_is_one_clear_error(monkeypatch):
    for name in ("jetstream", "jetstream.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "rljax.serving.jetstream.adapter", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'rljax\[jetstream\]'"):
        import rljax.serving.jetstream.adapter  # noqa: F401
