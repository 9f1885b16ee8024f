"""Python as a tool: what a program prints. That it does no harm is tested with the sandbox itself."""

import time

import pytest

from rljax.errors import ConfigError
from rljax.sandbox.process import missing_isolation
from rljax.tools import python
from rljax.tools.base import ToolError
from rljax.tools.python import Python


@pytest.fixture(scope="module")
def tool():
    if missing_isolation() is not None:
        pytest.skip("this machine cannot isolate programs")
    return Python(20.0)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(347 * 862 - 95)", "299019"),
        ("\nfor i in range(3):\n    print(i, end=' ')\n", "0 1 2"),
        ("import sys\nprint('é')\nsys.exit(3)\nprint(1)", "é"),
        ("2 + 2", ""),
        ("print(input())", "EOFError"),
        ("print('x'); 1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise ValueError('a\\nb')", "ValueError: a\nb"),
        ("print('so far', flush=True); import os; os.kill(os.getpid(), 11)", "the program was killed"),
        ("print(1)\nexit()", "1"),
        ("import sys\nsys.stdout = None", ""),
    ],
)
def test_answers_with_what_is_printed_or_says_what_was_raised(tool, code, answer):
    if "Error" in answer or "killed" in answer:
        with pytest.raises(ToolError, match=answer):
            tool.call(code)
    else:
        assert tool.call(code) == answer


def test_every_call_begins_anew(tool):
    assert tool.call("x = 5\nopen('/tmp/kept', 'w').write('5')\nprint(x)") == "5"
    with pytest.raises(ToolError, match="NameError"):
        tool.call("print(x)")
    with pytest.raises(ToolError, match="FileNotFoundError"):
        tool.call("print(open('/tmp/kept').read())")


def test_what_does_not_end_is_ended(tool):
    start = time.monotonic()
    with pytest.raises(ToolError, match=r"no answer after 0\.5 s"):
        Python(0.5).call("while True: pass")
    assert time.monotonic() - start < 10
    assert len(tool.call("while True: print('x' * 1000)")) <= 1 << 16


def test_without_isolation_the_run_does_not_begin(monkeypatch):
    monkeypatch.setattr(python, "missing_isolation", lambda: "it runs elsewhere")
    with pytest.raises(ConfigError, match=r"tools\.names: python .*it runs elsewhere"):
        Python(1.0)
