"""The server as clients see it: OpenAI's own, many at once, rude ones, and what cannot be answered."""

import collections
import concurrent.futures
import functools
import itertools
import json
import socket
import threading
import time
import types

import httpx2
import jax
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageToolCall

from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.model import HeadConfig, init_head
from drafters.eagle.objective import published_training
from drafters.eagle.spot_trainer import BufferSettings, HeadTrainer, head_optimizer
from drafters.small_model import SmallModelDrafter
from rljax.assembly.saved_policy import load_saved_policy
from rljax.engine.background import CompilerThread
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.models.huggingface import save_model
from rljax.models.rope import rope_table
from rljax.numerics.rows import Numerics
from rljax.serving.jobs import QueueFull
from rljax.serving.programs import JoiningPrograms
from rljax.speculation import speculator as speculation
from rljax.speculation.device_proposers import DeviceProposer
from tests.scripts import load_script
from tests.serving.tiny_server import MODEL, SLOTS, client_of, make_run, serving
from tests.tiny_policy import CheapTimes

QUESTION = [{"role": "user", "content": "47a5b8="}]
NOTHING = types.SimpleNamespace(content=[])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(run):
    with serving(run) as (address, served):
        yield address, served


@pytest.fixture(scope="module")
def client(server):
    return client_of(server[0])


def chat(client, seed, **more):
    more = {"extra_body": {"return_token_ids": True}} | more
    return client.chat.completions.create(model=MODEL, messages=QUESTION, seed=seed, **more)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def slow_down(served, monkeypatch, seconds=0.1):
    """Every host sync takes so long that a response takes a second."""
    step = served.worker.loop.step
    monkeypatch.setattr(served.worker.loop, "step", lambda: (time.sleep(seconds), step()))


def is_idle(served):
    return served.worker.active == served.worker.waiting == 0


def test_the_client_gets_what_generate_prints(client, run, capsys):
    """The same seed, prompt and settings: the same text and tokens, alone or as one of several samples."""

    def printed(*options):
        assert load_script("generate").main([str(run), QUESTION[0]["content"], *options]) == 0
        return capsys.readouterr().out

    choices = chat(client, 11, n=3).choices
    lines = [line.split() for line in printed("--seed", "11", "--tokens", "-n", "3").splitlines()]
    said = [[str(token) for token in choice.token_ids] for choice in choices]
    assert [line for line in lines if "of" not in line] == said
    assert printed("--seed", "11") == choices[0].message.content + "\n"
    assert chat(client, 11).choices[0].token_ids == choices[0].token_ids
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    assert chat(client, 12).choices[0].token_ids != choices[0].token_ids
    asked = chat(client, 11, temperature=0.5, top_p=0.8).choices[0].token_ids
    options = ["--seed", "11", "--tokens", "--temperature", "0.5", "--top-p", "0.8"]
    assert printed(*options).split() == [str(token) for token in asked]


def test_a_completion_continues_a_text_or_tokens_as_they_stand(client, server, run, capsys):
    tokenizer = server[1].tokenizer
    ask = lambda prompt, **more: client.completions.create(  # noqa: E731
        model=MODEL, prompt=prompt, seed=4, extra_body={"return_token_ids": True}, **more
    )
    text = ask("12a3=")
    ids = tokenizer.encode("12a3=")
    both = ask([ids, tokenizer.encode("9b=")], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].token_ids == text.choices[0].token_ids
    assert both.choices[2].token_ids == ask("9b=").choices[0].token_ids
    assert text.usage.prompt_tokens == len(ids)
    assert text.usage.completion_tokens == len(text.choices[0].token_ids)
    assert text.usage.total_tokens == len(ids) + len(text.choices[0].token_ids)
    assert load_script("generate").main([str(run), "12a3=", "--raw", "--seed", "4"]) == 0
    assert capsys.readouterr().out == text.choices[0].text + "\n"


MIXES = [
    {"temperature": 0.3},
    {"temperature": 0},
    {},
    {"temperature": 1.5, "top_p": 0.9},
    {"extra_body": {"return_token_ids": True, "top_k": 5, "min_p": 0.02}},
]


def test_requests_at_once_with_their_own_sampling_get_what_each_gets_alone(client, server):
    """Alone, and beside seven times as many as there are slots."""
    ids = lambda settings: [choice.token_ids for choice in chat(client, 7, n=2, **settings).choices]  # noqa: E731
    alone = [ids(settings) for settings in MIXES]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ids, MIXES * 3)) == alone * 3
    assert len({str(each) for each in alone}) == len(MIXES)
    wait_until(lambda: is_idle(server[1]))
    assert server[1].worker.error is None


def test_seeds(client):
    """Greedy requests have no use for one, and without one every request is its own."""
    said = lambda seeds, **more: {chat(client, seed, **more).choices[0].message.content for seed in seeds}  # noqa: E731
    assert len(said((1, 2, 3), temperature=0)) == 1
    assert len(said((1, 2, 3))) == 3
    assert len(said((None, None, None))) == 3
    same = client.completions.create(model=MODEL, prompt=["12a3="] * 3).choices
    assert len({choice.text for choice in same}) == 3


def test_max_tokens_and_a_stop_string_end_the_text(client):
    whole, cut = chat(client, 5).choices[0], chat(client, 5, max_completion_tokens=7).choices[0]
    assert cut.token_ids == whole.token_ids[:7] != whole.token_ids and cut.finish_reason == "length"
    stop = whole.message.content[6:8]
    cut = chat(client, 5, stop=["never there", stop]).choices[0]
    assert cut.message.content == whole.message.content[: whole.message.content.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    streamed = [event.choices[0].delta.content or "" for event in chat(client, 5, stop=stop, stream=True)]
    assert "".join(streamed) == cut.message.content
    nearly = whole.message.content[-1] + " never there"  # its beginning is held back, and said in the end
    assert chat(client, 5, stop=nearly).choices[0] == whole


def test_a_stop_string_may_be_a_special_token(client, server):
    stop = "<|im_start|>"
    (ends_with,) = server[1].tokenizer.encode(stop)
    samples = lambda **more: [each for seed in range(4) for each in chat(client, seed, n=8, **more).choices]  # noqa: E731
    found = 0
    for whole, cut in zip(samples(), samples(stop=stop), strict=True):
        if ends_with not in whole.token_ids:
            assert cut == whole
            continue
        found += 1
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(ends_with) + 1]
        assert cut.finish_reason == "stop"
        assert cut.message.content == server[1].tokenizer.response_text(cut.token_ids[:-1])
    assert found, "random weights should have sampled it"


def test_a_stream_says_the_same(client):
    n = 3
    whole = chat(client, 21, n=n, logprobs=True)
    texts, tokens, logprobs = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]
    reasons, usage, events = [None] * n, None, 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for event in chat(client, 21, n=n, logprobs=True, **options):
        events += 1
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert events > 3 * n
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "top_p": 0.9}])
def test_alternatives_are_of_the_distribution_that_sampled(client, server, settings):
    """The sampled token has among them the very logprob that decoding gave it."""
    choice = chat(client, 2, logprobs=True, top_logprobs=20, **settings).choices[0]
    content, decode = choice.logprobs.content, server[1].tokenizer.decode
    assert [each.token for each in content] == [decode([token]) for token in choice.token_ids]
    plain = chat(client, 2, logprobs=True, **settings).choices[0].logprobs.content
    assert [each.logprob for each in content] == [each.logprob for each in plain]
    found = 0
    for token in content:
        logprobs = [other.logprob for other in token.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and sum(map(np.exp, logprobs)) <= 1 + 1e-5
        assert token.logprob <= logprobs[0]
        found += (token.token, token.logprob) in {(each.token, each.logprob) for each in token.top_logprobs}
    assert found > 2
    few = chat(client, 2, logprobs=True, top_logprobs=3, stream=True, **settings)
    few = [token for event in few for token in (event.choices[0].logprobs or NOTHING).content]
    assert [token.top_logprobs for token in few] == [token.top_logprobs[:3] for token in content]


class Recording:
    """A pool that notes what it is asked to compile."""

    def __init__(self):
        self.keys = set()

    def get(self, key, function, args, donate_argnums=()):
        self.keys.add(key)


def test_a_server_compiles_in_the_background_what_requests_need(client, server, monkeypatch):
    """Every program of plain decoding that requests have used; in a larger one, also the moves of states."""
    worker = server[1].worker
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(chat, client, seed, n=1 + seed % 3) for seed in range(4)]
        assert [len(each.result().choices) for each in asked] == [1, 2, 3, 1]
    engine, recording = worker.engine, Recording()
    used = {key for key in engine.pool._programs if key[0] != "score"}
    monkeypatch.setattr(engine, "pool", recording)

    def programs_of(engine, slots):
        thread = CompilerThread(engine.buckets, (engine.buckets.batch[0], engine.buckets.cache[0]))
        return JoiningPrograms(engine, worker.params, thread, slots, server[1].max_prompt_tokens)

    assert programs_of(engine, SLOTS).wait() and used <= recording.keys
    parts, more = (engine.config, engine.numerics, engine.sampling), Recording()
    larger = DecodeEngine(*parts, make_buckets(8, 300, True), engine.eos_token_ids, pool=more)
    programs = programs_of(larger, 8)
    first = {key[:3] for key in more.keys}
    assert {key[0] for key in first} >= {"prefill", "insert", "generate", "free"}
    assert programs.left == 3 * 4 - 1 and ("generate", 2, 128) in first and ("generate", 8, 128) not in first
    assert programs.wait() and programs.left == 0
    made = {key[:4] for key in more.keys}
    for length in (128, 192, 256, 512):
        assert {("widen", 2, 4, length), ("widen", 4, 8, length)} <= made
        assert {("compact", 4, 2, length), ("compact", 8, 4, length)} <= made
        assert {("generate", batch, length) for batch in (2, 4, 8)} <= {key[:3] for key in made}
    assert {("grow", 4, 128, 192), ("grow", 8, 192, 256), ("grow", 2, 256, 512)} <= made


def test_alternatives_under_filters_and_without_a_choice(client):
    """What filters exclude is none; those of greedy requests are of the policy, as others would have none."""
    more = {"extra_body": {"top_k": 4}, "temperature": 0.5, "logprobs": True, "top_logprobs": 20}
    for token in chat(client, 3, **more).choices[0].logprobs.content:
        assert len(token.top_logprobs) == 4
        assert sum(np.exp(other.logprob) for other in token.top_logprobs) == pytest.approx(1.0, abs=1e-5)
    for token in chat(client, 3, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob < 0 and len(token.top_logprobs) == 2
        assert token.token == token.top_logprobs[0].token


def test_an_echoed_prompt_has_the_logprobs_of_decoding(client, server):
    """What was sampled at temperature 1 has the same logprobs, bit by bit, when it comes back as a prompt."""
    complete = functools.partial(
        client.completions.create, model=MODEL, seed=6, temperature=1, extra_body={"return_token_ids": True}
    )
    prompt = server[1].tokenizer.encode("12a3=")
    sampled = complete(prompt=prompt, logprobs=0, max_tokens=20).choices[0]
    whole = complete(prompt=prompt, logprobs=2, max_tokens=20, echo=True).choices[0]
    known = complete(prompt=prompt + sampled.token_ids, logprobs=2, max_tokens=0, echo=True)
    assert known.usage.completion_tokens == 0 and known.choices[0].finish_reason == "length"
    known = known.choices[0]
    assert known.text == whole.text == "12a3=" + sampled.text
    assert known.logprobs == whole.logprobs
    assert known.logprobs.token_logprobs[0] is known.logprobs.top_logprobs[0] is None
    assert known.logprobs.token_logprobs[len(prompt) :] == sampled.logprobs.token_logprobs
    columns = (known.logprobs.tokens, known.logprobs.token_logprobs, known.logprobs.top_logprobs)
    for token, logprob, others in zip(*(column[1:] for column in columns), strict=True):
        # Parts of characters have one text, under which the likeliest is shown.
        assert others[token] == logprob or "\N{REPLACEMENT CHARACTER}" in token
        assert 1 <= len(others) <= 3
    cold = complete(prompt=prompt + sampled.token_ids, temperature=0.5, logprobs=0, max_tokens=0, echo=True)
    assert cold.choices[0].logprobs.token_logprobs == known.logprobs.token_logprobs
    offsets = known.logprobs.text_offset
    assert offsets[: len(prompt)] == [0, 1, 2, 3, 4] and offsets[len(prompt)] == len("12a3=")
    streamed = list(complete(prompt=prompt, logprobs=2, max_tokens=20, echo=True, stream=True))
    assert "".join(event.choices[0].text for event in streamed) == whole.text
    assert [event.choices[0].logprobs for event in streamed if event.choices[0].logprobs] == [whole.logprobs]


def test_a_conversation_with_calls_goes_to_the_template(client, server, monkeypatch):
    """With the objects that OpenAI's client has made of an answer, and further variables."""
    rendered = []
    template = lambda *turns, **more: rendered.append((turns, more)) or "1"  # noqa: E731
    monkeypatch.setattr(server[1].tokenizer, "apply_chat_template", template)
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = ChatCompletionMessageToolCall(id="c1", type="function", function=function)
    turn = ChatCompletionMessage(role="assistant", content=None, tool_calls=[call])
    messages = [*QUESTION, turn, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=more)
    ((turns, variables),) = rendered
    assert variables == {"enable_thinking": False}
    written = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert turns[0][1] == {"role": "assistant", "content": "", "tool_calls": [written]}
    assert turns[0][2] == messages[2]


def test_an_answer_can_be_sent_back(client):
    """As it came, and with everything that the client knows of a message."""
    answer = chat(client, 5, max_tokens=3).choices[0].message
    for turn in (answer, answer.model_dump()):
        messages = [*QUESTION, turn, *QUESTION]
        assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).choices


def test_the_server_goes_on_while_a_prompt_is_tokenized(server, monkeypatch):
    address, served = server
    begun, goes_on, encode = threading.Event(), threading.Event(), served.tokenizer.encode
    waiting = lambda *text: (begun.set(), goes_on.wait(60), encode(*text))[2]  # noqa: E731
    monkeypatch.setattr(served.tokenizer, "encode", waiting)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"model": MODEL, "prompt": "12a3=", "max_tokens": 1}
        asked = pool.submit(httpx2.post, f"{address}/v1/completions", json=body, timeout=120)
        try:
            assert begun.wait(60)
            assert httpx2.get(f"{address}/health", timeout=20).status_code == 200
            many = {"model": MODEL, "prompt": ["12a3="] * 1000}  # refused before one of them is looked at
            refused = httpx2.post(f"{address}/v1/completions", json=many, timeout=20)
            assert refused.status_code == 400 and "can ever wait" in refused.json()["error"]["message"]
        finally:
            goes_on.set()
        assert asked.result().status_code == 200


def test_a_full_queue_is_a_429(client, server, monkeypatch):
    def full(jobs):
        raise QueueFull("8 requests are waiting")

    monkeypatch.setattr(server[1].worker, "submit", full)  # when it does is in test_worker.py
    with pytest.raises(openai.RateLimitError, match="waiting") as refused:
        chat(client, 1)
    assert refused.value.response.headers["Retry-After"] == "1"


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_slots(server, monkeypatch, stream):
    address, served = server
    slow_down(served, monkeypatch)
    host, port = address.removeprefix("http://").split(":")
    cancelled = served.worker.endings["cancelled"]
    body = {"model": MODEL, "messages": QUESTION, "n": SLOTS + 1, "seed": 3, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(head.encode() + content)
        wait_until(lambda: served.worker.active == SLOTS)
    wait_until(lambda: is_idle(served))
    assert served.worker.endings["cancelled"] == cancelled + SLOTS + 1


BAD = [  # those that no policy would take are in test_protocol.py
    ({"model": "gpt-4"}, 404, "gpt-4"),
    ({"temperature": 1e-40}, 400, "temperature: 1e-40, expected 0 or 0.0001"),  # it overflows
    ({"top_p": 1e-42}, 400, "top_p: 1e-42, expected 1e-06 to 1"),  # it rounds to nothing
    ({"max_tokens": 49}, 400, "48"),
    ({"max_completion_tokens": 49}, 400, "max_completion_tokens: 49"),  # as it is called now
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "not Unicode"),  # half a character
    ({"messages": [{"role": "user", "content": "7a" * 200}]}, 400, "tokens"),
    ({"prompt": ""}, 400, "no tokens"),
    ({"prompt": [5, 100_000]}, 400, "vocabulary"),
    ({"prompt": [-1]}, 400, "vocabulary"),
]


@pytest.mark.parametrize(("change", "status", "said"), BAD)
def test_bad_requests_are_refused_with_a_reason(server, change, status, said):
    address, served = server
    kind, asked = ("", {}) if "prompt" in change else ("chat/", {"messages": QUESTION})
    body = json.dumps({"model": MODEL} | asked | change)
    response = httpx2.post(f"{address}/v1/{kind}completions", content=body.encode())
    error = response.json()["error"]
    assert response.status_code == status and error["type"] == "invalid_request_error"
    assert said in error["message"] and is_idle(served)


@pytest.mark.parametrize(
    "method, path, content, status",
    [
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b" " * (5 << 20), 413),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/models/other", None, 404),
    ],
)
def test_what_is_no_request_at_all(server, method, path, content, status):
    response = httpx2.request(method, server[0] + path, content=content)
    assert response.status_code == status and response.json()["error"]["message"]


def test_a_chat_needs_a_template(client, server, monkeypatch):
    """The policy of a directory without one answers plain prompts only."""
    monkeypatch.setattr(server[1].tokenizer, "_chat_template", None)
    with pytest.raises(openai.BadRequestError, match="chat template"):
        chat(client, 1)
    assert client.completions.create(model=MODEL, prompt="1a2=", max_tokens=2).choices


def test_models_health_and_metrics(client, server):
    address, _ = server
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx2.get(f"{address}/health").json() == {"status": "ok"}

    def metrics():
        lines = httpx2.get(f"{address}/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    before = metrics()
    tokens = len(chat(client, 30).choices[0].token_ids)
    httpx2.post(f"{address}/v1/completions", json={})
    after = metrics()
    difference = lambda name: float(after.get(name, 0)) - float(before.get(name, 0))  # noqa: E731
    assert difference("rljax_response_tokens_total") == tokens
    assert difference('rljax_refused_requests_total{status="400"}') == 1
    assert sum(difference(name) for name in after if name.startswith("rljax_responses_total")) == 1
    assert float(after["rljax_slots"]) == SLOTS and float(after["rljax_up"]) == 1


def test_a_worker_that_fails_says_so_to_all(run, monkeypatch):
    """In the stream that has begun, to who waits for a whole answer, and to who comes later."""
    with serving(run) as (address, served):
        client, collect, begun = client_of(address), served.worker.loop._collect, threading.Event()

        def fail(*arguments):
            if served.worker.active == 2 and begun.is_set():
                raise FloatingPointError("the device is gone")
            collect(*arguments)

        monkeypatch.setattr(served.worker.loop, "_collect", fail)
        slow_down(served, monkeypatch)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            events = iter(chat(client, 1, stream=True))
            next(events)
            whole = pool.submit(chat, client, 2)
            begun.set()
            with pytest.raises(openai.APIError, match="the device is gone"):
                list(events)
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                whole.result()
        assert httpx2.get(f"{address}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            chat(client, 1)


@pytest.mark.long
def test_served_with_a_head_and_a_small_model(run, server, client, tmp_path, monkeypatch):
    """The tokens of plain decoding; of both drafters' some were right, and the head is the checkpoint's."""
    saved = load_saved_policy(run)
    policy, params = saved.policy.config, saved.policy.params
    save_model(tmp_path / "small", policy, params, "float32", saved.policy.tokenizer_directory)
    head, training = HeadConfig("eagle", policy), published_training("eagle")
    rope, numerics = rope_table(policy, 65), Numerics(False)
    trained_head = init_head(head, params, 7)
    trainer = HeadTrainer(
        head, training, head_optimizer(1e-3), rope, numerics, BufferSettings(), 64, 1, 0, trained_head
    )
    learned = {f"eagle/{name}": array for name, array in trainer.state().items()}
    learned["eagle/step"] = np.array(3)
    args = "{variant: eagle, depths: [2], save_dir: %s}" % (tmp_path / "heads")
    overrides = [f"speculation.args={{path: {tmp_path / 'small'}}}", f"speculation.others={{eagle: {args}}}"]
    overrides += ["speculation.drafter=small_model", "rollout.max_prompt_length=16"]
    overrides += ["engine.cache_buckets=[64]", "engine.decode_steps_per_sync=4"]
    run = make_run(tmp_path, *overrides, drafter=learned)
    accepted, turns, rate = collections.Counter(), itertools.cycle((0, 1, 1, 0)), DeviceProposer.expected_rate
    monkeypatch.setattr(DeviceProposer, "expected_rate", lambda *asked: next(turns) * rate(*asked))
    for kind in (EagleDrafter, SmallModelDrafter):

        def observe(self, sampled, hear=kind.observe):
            accepted[type(self)] += int(sampled.accepted.sum())
            hear(self, sampled)

        monkeypatch.setattr(kind, "observe", observe)
    monkeypatch.setattr(speculation, "PassTimes", CheapTimes)
    expected = [chat(client, seed).choices[0].token_ids for seed in range(3)]
    with serving(run) as (address, served):
        assert served.drafters == ("small_model", "eagle")
        its_head = served.worker.speculator.drafters["eagle"].trainer.params
        jax.tree.map(np.testing.assert_array_equal, its_head, trained_head)
        drafted, pool_of_programs = client_of(address), served.worker.engine.pool
        programs = len(pool_of_programs)
        for _ in range(3):  # and nothing in between
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                came = list(pool.map(lambda seed: chat(drafted, seed).choices[0].token_ids, range(3)))
            assert came == expected
        assert accepted[SmallModelDrafter] > 20 and accepted[EagleDrafter] > 0
        # Prompts of every length, other numbers of them at once, and some that join others.
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            prompts = [["1"], ["12a3=", "9b=", "9b="], ["7" * 15, "1"], ["7a" * 8] * 5]
            ask = lambda prompt: drafted.completions.create(model=MODEL, prompt=prompt)  # noqa: E731
            assert [len(came.choices) for came in pool.map(ask, prompts)] == [1, 3, 2, 5]
        assert len(pool_of_programs) == programs, "compiled after it was warmed up"
    assert not (tmp_path / "heads").exists()
