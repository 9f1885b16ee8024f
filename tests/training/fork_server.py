"""Training commands in processes of their own, without the seconds that each would spend on importing.

    python -m tests.training.fork_server

reads a line of JSON a command: {"arguments": [...], "errors": FILE, "file_size": most bytes of a file, or
null}. It says the number of the process that carries it out, and when that is over its exit status, negative
for a signal. JAX is imported here but begins in the child: no thread of its is lost by forking.
"""

import json
import os
import resource
import signal
import sys
import traceback
import zlib

from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.scripts import load_script


def luck(task: ChainArithmetic, problem: object, text: str) -> dict[str, float]:
    """A reward that every response has its own of: so small a policy never earns one."""
    return {"reward": zlib.crc32(text.encode()) % 1000 / 1000}


def carry_out(command: dict) -> int:
    train = load_script("train")
    ChainArithmetic.reward = luck
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = open(command["errors"], "a", buffering=1)  # noqa: SIM115
    if command["file_size"] is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["file_size"], hard))
    try:
        return train.main(command["arguments"])
    except BaseException:
        traceback.print_exc()
        return 70


def serve() -> None:
    import rljax.training.session  # noqa: F401

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(carry_out(json.loads(line)))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
