"""The script that tests a program inside the sandbox; its source follows that of values.py.

It reads one JSON object from standard input: `code`, `tests`, the time limit `seconds` of a test, and the
limit `max_output` on the bytes of an answer. A test is {"input": text}, a program's standard input, or
{"call": name, "args": [...], "keywords": {...}, "within": [...]}: the builtins named in `within` are applied
to the result of the call, the last one first.

It writes {"ready": true}, and then one JSON line per test: {"output": text}, {"value": encoded} or {"error":
reason}. The right answers are not in the sandbox, so the tested code cannot read them, even if it takes over
this process.

Every test runs in a separate process and directory, so that it cannot affect the next.
"""

import builtins
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import types


def _run_program(code, text, answer):
    """Runs the code as a whole program, with standard output as the answer."""
    with open("input", "w") as file:
        file.write(text)
    os.dup2(os.open("input", os.O_RDONLY), 0)
    os.unlink("input")
    os.dup2(answer, 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    with contextlib.suppress(SystemExit):
        exec(compile(code, "response", "exec"), _module("__main__"))
    sys.stdout.flush()


def _call_function(code, test, answer):
    """Calls a function of the code, or a method of its class `Solution`; the result is the answer."""
    name, within = test["call"], [getattr(builtins, name) for name in test["within"]]
    names = _module("response")
    exec(compile(code, "response", "exec"), names)
    if name not in names and "Solution" in names:
        function = getattr(names["Solution"](), name)
    else:
        function = names[name]
    keywords = dict(zip(test["keywords"], decode_arguments(test["keywords"].values()), strict=True))
    value = function(*decode_arguments(test["args"]), **keywords)
    for builtin in reversed(within):
        value = builtin(value)
    text = json.dumps(encode(value))  # noqa: F821  (defined in values.py)
    with open(answer, "w", closefd=False) as file:
        file.write(text)


def _module(name):
    """Returns the names of a new module, entered in `sys.modules` for dataclasses and others."""
    module = sys.modules[name] = types.ModuleType(name)
    return vars(module)


def decode_arguments(args):
    """Decodes values, which come from the dataset, not from the tested code."""
    kinds = {"l": list, "t": tuple, "s": set}

    def decode(value):
        if not isinstance(value, list):
            return value
        tag, *items = value
        if tag in kinds:
            return kinds[tag](map(decode, items))
        if tag == "d":
            return {decode(key): decode(item) for key, item in items}
        return bytes.fromhex(items[0]) if tag == "b" else float(items[0])

    return [decode(value) for value in args]


def _in_child(test, code, seconds, answer):
    os.setpgid(0, 0)
    bound = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (bound, bound))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if "input" in test:
        _run_program(code, test["input"], answer)
    else:
        _call_function(code, test, answer)


def _read_answer(child, answer, seconds, max_output):
    """Reads the child's output until it ends, without waiting for descendants that keep the pipe open."""
    deadline, output, status = time.monotonic() + seconds, b"", None
    while True:
        if status is None:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
        wait = 0 if status is not None else max(0, min(0.01, deadline - time.monotonic()))
        if select.select([answer], [], [], wait)[0]:
            read = os.read(answer, 65536)
            output += read
            if len(output) > max_output:
                return output, "too much output"
            if read:
                continue
            time.sleep(0.001)  # the child has closed the pipe but not ended
        if status is not None:
            return output, None if status == 0 else "it raised or was killed"
        if time.monotonic() >= deadline:
            return output, "it takes too long"


def _outcome(test, code, seconds, max_output, protocol):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            protocol.close()
            _in_child(test, code, seconds, write)
        except BaseException:
            os._exit(1)
        if "call" in test:
            os._exit(0)
        raise SystemExit  # a normal end, which waits for threads and calls exit handlers
    os.close(write)
    output, error = _read_answer(child, read, seconds, max_output)
    os.close(read)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if os.getpid() == 2:  # in the strong jail all processes but this and the first belong to the test
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    if error is not None:
        return {"error": error}
    if "input" in test:
        return {"output": output.decode("utf-8", "replace")}
    try:
        return {"value": json.loads(output)}
    except (ValueError, RecursionError):
        return {"error": "it left without an answer"}


def main():
    request = json.loads(sys.stdin.buffer.readline())
    protocol = os.fdopen(os.dup(1), "w")
    protocol.write('{"ready": true}\n')
    protocol.flush()
    home = os.getcwd()
    kept = set(os.listdir(home))
    for number, test in enumerate(request["tests"]):
        os.mkdir(f"{home}/test{number}")
        os.chdir(f"{home}/test{number}")
        outcome = _outcome(test, request["code"], request["seconds"], request["max_output"], protocol)
        protocol.write(json.dumps(outcome) + "\n")
        protocol.flush()
        for name in set(os.listdir(home)) - kept:
            shutil.rmtree(f"{home}/{name}", ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(f"{home}/{name}")


if __name__ == "__main__":
    main()
