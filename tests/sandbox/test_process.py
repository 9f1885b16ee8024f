"""The sandbox where the strong jail is missing, and how a program is talked to."""

import uuid

import pytest

from rljax.errors import UserError
from rljax.sandbox import process
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, SandboxError

from .processes import end


@pytest.fixture
def no_namespaces(monkeypatch):
    monkeypatch.setattr(process, "missing_isolation", lambda: "unshare: Operation not permitted")


def test_without_isolation_nothing_runs_unless_the_config_says_so(no_namespaces):
    with pytest.raises(SandboxError) as caught:
        Sandbox().run("print(1)", b"", 5)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    for part in ("Operation not permitted", "task.sandbox.allow_weak: true", "read your files"):
        assert part in str(caught.value)
    assert Sandbox(allow_weak=True).run("print(1)", b"", 20).output == b"1\n"


def test_the_weak_jail_still_bounds_accidents(no_namespaces, monkeypatch, tmp_path):
    monkeypatch.setenv("RLJAX_TEST_TOKEN", "hunter2")
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(Limits(memory_mb=256, file_mb=1), allow_weak=True)
    bomb = "try: bytearray(1 << 30)\nexcept MemoryError as e: print(repr(e))"
    assert b"MemoryError" in sandbox.run(bomb, b"", 20).output
    assert b"hunter2" not in sandbox.run("import os; print(os.environ)", b"", 20).output
    sandbox.run("open('here', 'w').write('x')", b"", 20)
    assert list(tmp_path.iterdir()) == []
    marker = uuid.uuid4().hex
    orphans = (
        f"import os, time  # {marker}\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
    )
    for ending in ("time.sleep(0.2)", "while True: pass"):
        sandbox.run(orphans + f"        time.sleep(99)\n{ending}", b"", 1.0)
        assert end(marker) == []


@pytest.mark.parametrize("weak", [False, True])
def test_an_interpreter_that_cannot_start_is_one_error(monkeypatch, weak):
    monkeypatch.setattr(process, "missing_isolation", lambda: "none" if weak else None)
    paths, real = iter(["/nowhere/python"]), process.os.path.realpath  # as it is found before the launcher's
    monkeypatch.setattr(process.os.path, "realpath", lambda path: next(paths, None) or real(path))
    with pytest.raises(SandboxError, match="sandbox: cannot start"):
        Sandbox(allow_weak=weak).run("print(1)", b"", 5)


def test_long_input_and_output_do_not_block_each_other():
    source = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    data = b"".join(b"%d\n" % i for i in range(50_000))  # more than pipes hold
    assert Sandbox(allow_weak=True).run(source, data, 60, 2 << 20).output == data


def test_a_conversation_is_line_by_line():
    source = "import sys\nfor line in sys.stdin: print(line.strip() * 2 + '\\nmore', flush=True)"
    with Sandbox(allow_weak=True).start(source) as program:
        assert program.exchange(b"ab\n", 10, 100, line=True).output == b"abab\n"
        assert program.exchange(b"", 10, 100, line=True).output == b"more\n"
        assert program.exchange(b"c\n", 10, 100, line=True).output == b"cc\n"
        assert program.exchange(b"", 10, 100, line=True).output == b"more\n"
        assert program.exchange(b"", 0.1, 100, line=True).ending == "timeout"
