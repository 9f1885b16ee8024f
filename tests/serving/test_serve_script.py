"""scripts/serve.py as a process: it listens, answers, and on SIGTERM finishes what it has begun."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

from tests.scripts import SCRIPTS, load_script
from tests.serving.tiny_server import client_of, make_run

QUESTION = [{"role": "user", "content": "47a5b8="}]


@pytest.mark.slow
def test_it_serves_until_sigterm_and_finishes_what_it_has(tmp_path):
    run = make_run(tmp_path)
    process = subprocess.Popen(
        [
            sys.executable,
            str(SCRIPTS / "serve.py"),
            str(run),
            "--port",
            "0",
            "--name",
            "mine",
            "--slots",
            "2",
        ],
        env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening on" in line:
                break
        assert process.poll() is None, "".join(lines)
        client = client_of(lines[-1].split()[-1])
        assert [model.id for model in client.models.list()] == ["mine"]
        ask = lambda seed, **more: client.chat.completions.create(  # noqa: E731
            model="mine", messages=QUESTION, seed=seed, **more
        )
        whole = ask(1, n=8).choices
        events = iter(ask(1, n=8, stream=True))
        first = next(events)
        process.send_signal(signal.SIGTERM)
        texts = [""] * 8
        for event in (first, *events):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        assert process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            ask(1)
    finally:
        process.kill()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "nowhere"),
        (["nowhere", "--queue", "0"], "--queue"),
        (["nowhere", "--slots", "0"], "--slots"),
        (["nowhere", "--port", "70000"], "--port"),
        (["nowhere", "--host", "256.256.256.256"], "--host"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    port = [] if "--port" in arguments else ["--port", "0"]
    assert load_script("serve").main([*arguments, *port]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
