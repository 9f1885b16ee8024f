"""Serve a trained policy: `rljax serve runs/quickstart --port 8000`."""

import argparse
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.commands.generate import add_policy_options, open_served, say
from rljax.errors import ConfigError, UserError, exit_status

if TYPE_CHECKING:
    import uvicorn

    from rljax.engine.executables import ExecutablePool
    from rljax.serving.programs import JoiningPrograms
    from rljax.serving.worker import EngineWorker


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a policy by OpenAI's HTTP interface (/v1/chat/completions, /v1/completions)."
        " SIGTERM finishes what is being answered and leaves.",
        allow_abbrev=False,
    )
    parser.add_argument("policy", help="a run directory, a Hugging Face directory, or org/name[@revision]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free [8000]")
    parser.add_argument("--name", help="what clients call the model [the directory's name]")
    parser.add_argument("--slots", type=int, help="responses decoded at a time [the run's engine.max_slots]")
    parser.add_argument("--queue", type=int, default=256, help="responses that may wait for a slot [256]")
    parser.add_argument(
        "--steps-per-look",
        type=int,
        default=4,
        help="tokens of a response between two pieces of a stream, where none are drafted: fewer are"
        " smoother, more are faster [4]",
    )
    parser.add_argument(
        "--compile",
        choices=("before", "background"),
        help="when programs are compiled that the first answer does not need: in the background, or"
        " before the server is up [the run's engine.compile]",
    )
    parser.add_argument(
        "--drain-seconds", type=int, default=60, help="how long SIGTERM waits for responses [60]"
    )
    add_policy_options(parser)
    return parser


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser(prog).parse_args(argv)
    for name in ("queue", "steps_per_look", "drain_seconds"):
        if getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: {getattr(arguments, name)}, expected at least 1")
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("serving needs uvicorn: pip install 'rljax[serve]'") from error
    listener = _bind(arguments.host, arguments.port)  # before minutes of compiling
    name = arguments.name or Path(arguments.policy).resolve().name
    served = open_served(
        arguments,
        arguments.slots,
        arguments.compile,
        max_waiting=arguments.queue,
        steps_per_sync=arguments.steps_per_look,
    )
    from rljax.serving.app import make_app

    server = uvicorn.Server(
        uvicorn.Config(
            make_app(served, name), log_level="warning", timeout_graceful_shutdown=arguments.drain_seconds
        )
    )

    def leave(*_: object) -> None:  # before uvicorn takes signals, and when it hands them on in the end
        server.should_exit = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    try:
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on {arguments.port}: {error}") from error
    host, port = listener.getsockname()[:2]
    say(f"{name}: listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    served.worker.start()
    if served.programs is not None:
        compiling = served.programs, served.worker.engine.pool
        threading.Thread(target=_say_compiled, args=compiling, daemon=True).start()
    watching = threading.Thread(target=_leave_with, args=(served.worker, server), daemon=True)
    watching.start()
    server.run(sockets=[listener])
    served.worker.close(drain=False)
    watching.join()  # where decoding failed, it says so
    if served.worker.error is not None:
        say(f"error: decoding has failed: {served.worker.error}")
        return 1
    return 0


def _say_compiled(programs: "JoiningPrograms", pool: "ExecutablePool") -> None:
    """Says what is compiled while it answers, and when that is done."""
    left = programs.left
    if left:
        say(f"compiled meanwhile: the programs of {left} more shape{'' if left == 1 else 's'}")
        if not programs.wait():
            return
    say(f"everything is compiled: {len(pool)} programs, {pool.loaded} of them from disk")


def _leave_with(worker: "EngineWorker", server: "uvicorn.Server") -> None:
    """Ends the server when its worker ends."""
    error = worker.wait()
    if error is not None:
        if not isinstance(error, UserError):
            traceback.print_exception(error)
        server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Binds a port without accepting connections yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host, --port: cannot listen on {host}:{port}: {error}") from error
