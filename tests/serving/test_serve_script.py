"""scripts/serve.py as a process: it listens, answers, and on SIGTERM finishes what it has begun."""

import signal
import socket
import types

import openai
import pytest
import uvicorn

from rljax.commands import serve as serve_command
from rljax.commands.serve import _bind
from rljax.errors import ConfigError, PolicyError
from rljax.serving import app
from tests.fork_server import shared
from tests.scripts import SCRIPTS, load_script
from tests.serving.tiny_server import client_of, make_run

QUESTION = [{"role": "user", "content": "47a5b8="}]


def test_it_serves_until_sigterm_and_finishes_what_it_has(tmp_path):
    run = make_run(tmp_path, "engine.cache_buckets=[64]", "rollout.max_prompt_length=16")
    options = ["--port", "0", "--name", "served", "--slots", "2", "--compile", "background"]
    options += ["--cache", tmp_path / "cache"]
    script = f"import runpy; runpy.run_path({str(SCRIPTS / 'serve.py')!r}, run_name='__main__')"
    said = tmp_path / "said"
    said.touch()
    process = shared().start(script, [run, *options], tmp_path / "printed", said)
    try:
        while "listening on" not in said.read_text():
            assert process.wait(0.1) is None, said.read_text()
        client = client_of(said.read_text().partition("listening on ")[2].split()[0])
        assert [model.id for model in client.models.list()] == ["served"]
        ask = lambda seed, **more: client.chat.completions.create(  # noqa: E731
            model="served", messages=QUESTION, seed=seed, **more
        )
        whole = ask(1, n=8).choices
        events = iter(ask(1, n=8, stream=True))
        first = next(events)
        process.send(signal.SIGTERM)
        texts = [""] * 8
        for event in (first, *events):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole]
        assert process.wait(60) == 0
        assert said.read_text().startswith(f"loading {run}\n")
        compiled = ("compiled meanwhile: the programs of ", "everything is compiled: ")
        assert any(each in said.read_text() for each in compiled)
        assert any((tmp_path / "cache").iterdir())
        with pytest.raises(openai.APIConnectionError):
            ask(1)
    finally:
        process.send(signal.SIGKILL)


class Served:
    """A policy of which nothing is asked; its worker ends by `error`."""

    def __init__(self, error=None):
        self.error = error
        self.programs = None
        does = {"start": lambda: None, "wait": lambda: error, "close": lambda drain: True}
        self.worker = types.SimpleNamespace(**does, error=error)


@pytest.fixture
def serve(monkeypatch):
    """Runs the script with such a policy; `run` is what uvicorn does."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def serve(run, served, opening=lambda: None):
        monkeypatch.setattr(serve_command, "open_served", lambda *_, **__: (opening(), served)[1])
        monkeypatch.setattr(app, "make_app", lambda *_: None)
        monkeypatch.setattr(uvicorn.Server, "run", run)
        return load_script("serve").main(["policy", "--port", str(port)])

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.port = port
    yield serve
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_signal_is_heard_before_uvicorn_hears_signals(serve):
    heard = []

    def run(server, sockets):
        signal.raise_signal(signal.SIGTERM)
        heard.append(server.should_exit)

    assert serve(run, Served()) == 0 and heard == [True]


def test_nobody_is_let_in_before_it_can_answer(serve):
    connect = lambda: socket.create_connection(("127.0.0.1", serve.port), 10).close()  # noqa: E731

    def opening():
        with pytest.raises(ConnectionRefusedError):
            connect()

    assert serve(lambda server, sockets: connect(), Served(), opening) == 0
    with _bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            _bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("error", [IndexError("list index out of range"), PolicyError("policy: overflows")])
def test_what_ends_the_worker_is_said_with_where_it_happened(serve, error, capsys):
    """In one line what a user can mend."""
    try:
        raise error
    except type(error):
        assert serve(lambda server, sockets: None, Served(error)) == 1
    said = capsys.readouterr().err
    assert f"error: decoding has failed: {error}" in said
    assert ("test_what_ends_the_worker" in said) == isinstance(error, IndexError)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("", "nowhere"),
        ("--queue 0", "--queue"),
        ("--slots 0", "--slots"),
        ("--port 70000", "--port"),
        ("--host 256.256.256.256", "--host"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    assert load_script("serve").main(["nowhere", "--port", "0", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
