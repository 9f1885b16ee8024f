"""A tiny run, its policy behind a real HTTP server in a thread, and the client that people use."""

import contextlib
import socket
import threading

import openai
import uvicorn

from rljax.serving.app import make_app
from rljax.serving.policy import Options, open_policy
from tests.assembly.test_saved_policy import write_run

MODEL = "tiny"
SLOTS = 4


def make_run(directory, *overrides, drafter=None):
    """A run directory with a policy of random weights, which may be given what its drafters have learned."""
    few_programs = ("speculation.verify_buckets=[16]", "speculation.max_drafts=3")
    return write_run(directory, *few_programs, *overrides, steps=(1, 2), drafter=drafter)[0]


@contextlib.contextmanager
def serving(run, options=None, **worker):
    """Serves a run; gives (address, the served policy)."""
    served = open_policy(run, options or Options(), lambda line: None, compile_first=False, **worker)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(make_app(served, MODEL), log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    served.worker.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", served
    finally:
        server.should_exit = True
        thread.join(60)
        assert served.worker.close(drain=False, timeout=60)


def client_of(address):
    """OpenAI's client."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
