"""Unit tests of code from responses: what passes, what does not, and attempts to pass without an answer."""

import json

import pytest

from rljax.sandbox.code_tests import CodeTest, check_limits, parse_tests, run_tests
from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Sandbox, SandboxError

from .processes import namespaces

SANDBOX = Sandbox(Limits(memory_mb=256), allow_weak=not namespaces())
CALLS = parse_tests(
    ["assert pair(1, 2) == (1, 2)", {"call": "pair", "args": ["a", None], "output": ["a", None]}]
)
PROGRAM = parse_tests([{"input": "1 2\n", "output": "3\n"}, {"input": "10 5\n", "output": "15"}])


def outcomes(code, tests, each=10.0, total=60.0):  # seconds, many where none is to be cut off
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
    lines = "import sys\nprint(sum(map(int, sys.stdin)))"
    assert outcomes(lines, parse_tests([{"input": "1\n2", "output": "3"}])) == [True]
    assert outcomes(code + "raise ValueError\n", PROGRAM) == [False, False]


MAIN = "def main():\n    print(sum(map(int, input().split())))\n"
ENDINGS = {
    "raise SystemExit(0)": MAIN + "main()\nraise SystemExit(0)",
    "exit and quit": MAIN + "main()\nassert quit\nexit()",
    "a thread that is not joined": MAIN + "import threading, time\n"
    "def late():\n    time.sleep(0.05)\n    main()\nthreading.Thread(target=late).start()",
    "a pool that is not shut down": MAIN + "from concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor().submit(main)",
    "an exit handler": MAIN + "import atexit\natexit.register(main)",
    "a directory that stays": MAIN + "import os\nos.mkdir('input')\nos.mkdir('../input')\nmain()",
    "a dataclass": "from __future__ import annotations\nimport dataclasses\n" + MAIN + "main()\n"
    "@dataclasses.dataclass\nclass A:\n    x: int",
}


@pytest.mark.parametrize("code", ENDINGS.values(), ids=ENDINGS)
def test_programs_end_as_any_python_does(code):
    assert outcomes(code, PROGRAM) == [True, True]


def test_functions_live_in_a_module():
    code = ENDINGS["a dataclass"].replace("main()\n", "") + "\ndef f(x): return A(x).x"
    assert outcomes(code, parse_tests("assert f(3) == 3")) == [True]


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
    "returns as deep a list as can be read": "def pair(*args):\n    x = []\n    for _ in range(900): x = [x]"
    "\n    return (x, 2) if args[0] == 1 else [x, None]",
}


@pytest.mark.parametrize("code", SWINDLES.values(), ids=SWINDLES)
def test_nothing_passes_that_does_not_answer(code):
    assert outcomes(code, [*CALLS, PROGRAM[0]], each=0.5) == [False, False, False]


def test_a_test_that_hangs_takes_its_own_time_only():
    code = "def f(n):\n    while n == 0: pass\n    return n\n"
    tests = parse_tests([{"call": "f", "args": [n], "output": n} for n in (1, 0, 2)])
    assert outcomes(code, tests, each=0.3) == [True, False, True]
    assert outcomes(code, tests, each=30, total=1.0) == [True, False, False]


def test_tests_do_not_see_each_other_and_a_right_answer_may_be_long():
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    open('mark', 'a').close()\n    return len(seen)\n"
    assert outcomes(code, parse_tests(["assert f(0) == 1", "assert f(5) == 1"])) == [True, True]
    tests = parse_tests([{"input": "", "output": "9" * 300_000}])
    assert outcomes("print('9' * 300_000)", tests) == [True]


def test_forms_of_calls_and_programs():
    for tests, expected in (
        ("assert f(1, 'a') == [2]", [("f", [1, "a"], ["l", 2])]),
        ("assert f(1)\nassert not f(-2)\n", [("f", [1], True), ("f", [-2], False)]),
        (["assert f() is None"], [("f", [], None)]),
        ('[{"call": "f", "args": [{"a": 1}], "output": 2.5}]', [("f", [["d", ["a", 1]]], 2.5)]),
        ({"inputs": [[1], [2]], "outputs": [3, 4], "fn_name": "f"}, [("f", [1], 3), ("f", [2], 4)]),
    ):
        parsed = [(test.question["call"], test.question["args"], test.answer) for test in parse_tests(tests)]
        assert parsed == expected
    lists = {"inputs": ["1\n", "2\n"], "outputs": ["a", "b"]}
    pairs = [{"input": "1\n", "output": "a"}, {"input": "2\n", "output": "b"}]
    assert parse_tests(lists) == parse_tests(json.dumps(lists)) == parse_tests(pairs)
    assert parse_tests(pairs)[1] == CodeTest({"input": "2\n"}, "b")


JUDGED = {
    "assert f([3, 1]) == [3, 1]": [True, False, False],
    "assert [3, 1] == f([3, 1])": [True, False, False],
    "assert f(x=[3, 1]) != [3, 1]": [False, True, True],
    "assert set(f([3, 1])) == {1, 3}": [True, True, True],
    "assert set(f([3, 1])) == set((1, 3)), 'a message'": [True, True, True],
    "assert sorted(list(f(x=[3, 1]))) == [1, 3]": [True, True, True],
    "assert len(f([3, 1])) == 2": [True, True, True],
    "assert f(2.0) == 2": [True, False, False],
    "assert abs(f(2.0) - 2.1) < 0.2": [True, False, False],
    "assert abs(f(2.0) - 2.1) <= 0.05": [False, False, False],
    "assert math.isclose(f(2.0), 2.1, rel_tol=0.1)": [True, False, False],
    "assert isclose(f(2.0), 2.1)": [False, False, False],
    "assert not f(False)": [True, False, False],
}


def test_every_form_of_an_assertion_judges():
    """By what comes back, what comes back as a tuple's or a string's items, and a list backwards."""
    codes = ["def f(x): return x", "def f(x): return tuple(x)", "def f(x): return x[::-1]"]
    tests = parse_tests(list(JUDGED))
    judged = [outcomes(code, tests) for code in codes]
    assert dict(zip(JUDGED, map(list, zip(*judged, strict=True)), strict=True)) == JUDGED


def test_lists_of_calls_are_judged_as_their_files_mean_it():
    """JSON has no tuples, and APPS has most right values in a list of their own, and some not."""
    outputs = [[1, [1]], [[1, [1]]], [2, [1]], [[[1, [1]]]], 1]
    tests = {"fn_name": "f", "inputs": [[1]] * 5, "outputs": outputs}
    assert outcomes("def f(x): return (x, [x])", parse_tests(tests)) == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"file_mb": 0}, "file_mb 0 not even a correct"), ({"memory_mb": 8}, "did not begin .*memory_mb 8")],
)
def test_limits_under_which_nothing_passes_are_an_error(limits, says):
    with pytest.raises(SandboxError, match=rf"^task\.sandbox: .*{says}"):
        check_limits(Sandbox(Limits(**limits), allow_weak=not namespaces()))


NO_CALLS = """
assert f(x) == 1
assert f(1) == g(2)
__import__('os').system('true')
assert f(1) ==
assert f(*[1]) == 1
assert f(**{'a': 1}) == 1
assert f(1) < 2
assert abs(1 - 2) < 3
assert isclose(f(1), 2, tol=3)
assert f(1) == set([[]])
""".strip().splitlines()


NO_TESTS = [
    ([], "no tests"),
    ("", "no tests"),
    *((call, "not of the form") for call in NO_CALLS),
    ("assert f(" + "(" * 500 + ") == 1", "not of the form"),
    ([{"input": "1"}], "is no test"),
    ([{"input": 1, "output": "1"}], "is no test"),
    (3, "is no test"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs, but 0 outputs"),
]


def test_what_is_no_test_is_said():
    for tests, says in NO_TESTS:
        with pytest.raises(ValueError, match=says):
            parse_tests(tests)
