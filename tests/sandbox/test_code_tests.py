"""Unit tests of code from responses: what passes, what does not, and attempts to pass without solving"
" anything."""

import json

import pytest

from rljax.sandbox.code_tests import CodeTest, parse_tests, run_tests
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, missing_isolation

SANDBOX = Sandbox(Limits(memory_mb=256), allow_weak=missing_isolation() is not None)
CALLS = parse_tests(
    ["assert pair(1, 2) == (1, 2)", {"call": "pair", "args": ["a", None], "output": ["a", None]}]
)
PROGRAM = parse_tests([{"input": "1 2\n", "output": "3\n"}, {"input": "10 5\n", "output": "15"}])


def outcomes(code, tests, each=0.5, total=5.0):
    return run_tests(SANDBOX, code, tests, each, total)


def test_functions_are_called_and_values_compared():
    code = "def pair(a, b):\n    print('noise')\n    return (a, b) if a == 1 else [a, b]\n"
    assert outcomes(code, CALLS) == [True, True]
    assert outcomes(code.replace("(a, b) if", "[a, b] if"), CALLS) == [False, True]  # a list is no tuple
    method = "class Solution:\n    def pair(self, a, b): return (a, b)\n"
    assert outcomes(method, CALLS) == [True, False]


def test_programs_read_and_print():
    code = "a, b = map(int, input().split())\nprint(a + b, '')\n"
    assert outcomes(code, PROGRAM) == [True, True]
    assert outcomes(code.replace("a + b", "a * b + 1"), PROGRAM) == [True, False]
    assert outcomes(
        "import sys\nprint(sum(map(int, sys.stdin)))", parse_tests([{"input": "1\n2", "output": "3"}])
    ) == [True]
    assert outcomes(code + "raise SystemExit(0)\n", PROGRAM) == [True, True]
    assert outcomes(code + "raise ValueError\n", PROGRAM) == [False, False]


SWINDLES = {
    "claims": "print('all tests passed')",
    "leaves early": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "lying equality": """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def pair(*args): return Liar()
""",
    "a liar among strings": """
class Liar(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def pair(*args): return (Liar('x'), Liar('y'))
""",
    "writes verdicts to every file": """
import os
for number in range(3, 64):
    for line in (b'{"value": true}\\n', b'{"output": "3"}\\n', b'{"passed": true}\\n'):
        try: os.write(number, line)
        except OSError: pass
def pair(*args): os._exit(0)
""",
    "replaces what judges": """
import sys, json, builtins
main = sys.modules.get('__main__')
for module in (builtins, json, main):
    for name in ('same', 'encode', 'dumps', 'loads', 'passed'):
        setattr(module, name, lambda *args, **kwargs: True)
def pair(*args): return object()
""",
    "looks for the answers": """
import gc
def pair(*args):
    found = [x for x in gc.get_objects() if isinstance(x, dict) and 'answer' in x]
    return found[0]['answer'] if found else None
""",
    "kills the runner": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef pair(*args): return 1",
    "raises": "def pair(*args): raise ValueError",
    "is no Python": "def pair(:",
    "is empty": "",
    "prints without end": "while True: print('3' * 1000)",
    "returns without end": "def pair(*args): return [0] * 10_000_000",
    "recurses": "def pair(*args): return pair(*args)",
    "returns a deep list": "def pair(*args):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
}


@pytest.mark.parametrize("code", SWINDLES.values(), ids=SWINDLES)
def test_nothing_passes_that_does_not_answer(code):
    assert outcomes(code, CALLS) == [False, False]
    assert outcomes(code, PROGRAM[:1]) == [False]


def test_a_test_that_hangs_takes_its_own_time_only():
    code = "def f(n):\n    while n == 0: pass\n    return n\n"
    tests = parse_tests([{"call": "f", "args": [n], "output": n} for n in (1, 0, 2)])
    assert outcomes(code, tests, each=0.3) == [True, False, True]
    assert outcomes(code, tests, each=30, total=1.0) == [True, False, False]


def test_tests_do_not_see_each_other():
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    open('mark', 'a').close()\n    return len(seen)\n"
    assert outcomes(code, parse_tests(["assert f(0) == 1", "assert f(5) == 1"])) == [True, True]


@pytest.mark.parametrize(
    ("tests", "wanted"),
    [
        ("assert f(1, 'a') == [2]", [("f", [1, "a"], ["l", 2])]),
        ("assert f(1)\nassert not f(-2)\n", [("f", [1], True), ("f", [-2], False)]),
        (["assert f() is None"], [("f", [], None)]),
        ('[{"call": "f", "args": [{"a": 1}], "output": 2.5}]', [("f", [["d", ["a", 1]]], 2.5)]),
        ({"inputs": [[1], [2]], "outputs": [3, 4], "fn_name": "f"}, [("f", [1], 3), ("f", [2], 4)]),
    ],
)
def test_forms_of_calls(tests, wanted):
    assert parse_tests(tests) == [CodeTest({"call": n, "args": a}, right) for n, a, right in wanted]


def test_forms_of_programs():
    lists = {"inputs": ["1\n", "2\n"], "outputs": ["a", "b"]}
    pairs = [{"input": "1\n", "output": "a"}, {"input": "2\n", "output": "b"}]
    assert parse_tests(lists) == parse_tests(json.dumps(lists)) == parse_tests(pairs)
    assert parse_tests(pairs)[1] == CodeTest({"input": "2\n"}, "b")


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], "no tests"),
        ("", "no tests"),
        ("assert f(x) == 1", "not of the form"),
        ("assert f(1) == g(2)", "not of the form"),
        ("__import__('os').system('true')", "not of the form"),
        ("assert f(1) ==", "not of the form"),
        ("assert f(a=1) == 1", "not of the form"),
        ("assert f(" + "(" * 500 + ") == 1", "not of the form"),
        ([{"input": "1"}], "is no test"),
        ([{"input": 1, "output": "1"}], "is no test"),
        (3, "is no test"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, but 0 outputs"),
    ],
)
def test_what_is_no_test_is_said(tests, says):
    with pytest.raises(ValueError, match=says):
        parse_tests(tests)
