"""Unit tests of code in a response: the code runs in the sandbox, and its results are compared outside.

Forms of a test, in a dataset:

    {"input": "3 4\\n", "output": "7\\n"}              a program: standard input, expected output
    {"call": "add", "args": [3, 4], "output": 7}      a function, or a method of a class `Solution`
    "assert add(3, 4) == 7"                           the same as a call, as in MBPP; see `_parse_assert`
    {"inputs": [...], "outputs": [...], "fn_name": n} a list of tests, as in APPS; without a name, of programs

A test is data: none of it is executed here, and the right answer never enters the sandbox. So code that
prints "all tests passed", exits early or takes over the process that calls it still has to produce the
answer.
"""

import ast
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rljax.sandbox.process import Sandbox, SandboxError
from rljax.sandbox.values import Encoded, encode, same

_SOURCES = ("values.py", "code_runner.py")
_MAX_ANSWER = 1 << 18  # bytes that an answer may have beyond the longest right one
_WITHIN = {
    function.__name__: function
    for function in (abs, bool, float, frozenset, int, len, list, round, set, sorted, str, tuple)
}
_CHECK_SECONDS = 60.0
_READY = {"ready": True}


@dataclasses.dataclass(frozen=True)
class CodeTest:
    """One test.

    Attributes:
      question: request to the sandbox, {"input": text} or a call (see code_runner.py) with encoded values.
      answer: the right output, or the right value, encoded.
      rule: rule to judge a value by. "equal": as `==`. "unequal": as `!=`. "json": equal, with tuples as
        lists; an answer that is a list of one value also accepts that value (APPS).
      tolerance: relative and absolute tolerance of `math.isclose`, which then compares numbers instead.
    """

    question: dict[str, Any]
    answer: Encoded
    rule: Literal["equal", "unequal", "json"] = "equal"
    tolerance: tuple[float, float] | None = None

    def passed(self, outcome: Any) -> bool:
        """Checks one line of the runner. White space at the end of a program's lines is ignored."""
        if not isinstance(outcome, dict):
            return False
        if "input" in self.question:
            output = outcome.get("output")
            return isinstance(output, str) and _lines(output) == _lines(self.answer)
        try:
            return "value" in outcome and self._is_right(outcome["value"])
        except RecursionError:  # nested deeper than any right answer
            return False

    def _is_right(self, value: Encoded) -> bool:
        if self.tolerance is not None:
            relative, absolute = self.tolerance
            return _close(value, self.answer, relative, absolute)
        if self.rule == "unequal":
            return not same(value, self.answer)
        if self.rule == "json":
            value = _without_tuples(value)
            alone = isinstance(self.answer, list) and len(self.answer) == 2 and self.answer[0] == "l"
            return same(value, self.answer) or (alone and same(value, self.answer[1]))
        return same(value, self.answer)


def parse_tests(tests: Any) -> list[CodeTest]:
    """Reads tests in any of the forms above; text is JSON, or one `assert` per line.

    Raises:
      ValueError: the tests have another form, or there are none.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [line for line in tests.splitlines() if line.strip()]
    parsed = list(_parse(tests))
    if not parsed:
        raise ValueError("there are no tests")
    return parsed


def run_tests(
    sandbox: Sandbox, code: str, tests: Sequence[CodeTest], seconds_each: float, seconds: float
) -> list[bool]:
    """Returns whether the code passes each test; tests that do not run within `seconds` fail.

    Raises:
      SandboxError: the sandbox ended before it ran the code.
    """
    answers = [len(json.dumps(test.answer)) for test in tests]
    most = _MAX_ANSWER + max(answers, default=0)
    request = {
        "code": code,
        "tests": [test.question for test in tests],
        "seconds": seconds_each,
        "max_output": most,
    }
    source = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SOURCES)
    data = json.dumps(request).encode() + b"\n"
    finished = sandbox.run(source, data, seconds, 2 * most * (len(tests) + 1))
    ready, *outcomes = [_outcome(line) for line in finished.output.splitlines()] or [None]
    if ready != _READY:
        raise SandboxError(
            f"task.sandbox: the runner of the tests did not begin ({finished.ending}): memory_mb"
            f" {sandbox.limits.memory_mb} is too little, or this machine has none left"
        )
    outcomes = [*outcomes, *[None] * len(tests)]
    return [test.passed(outcome) for test, outcome in zip(tests, outcomes, strict=False)]


def check_limits(sandbox: Sandbox) -> None:
    """Checks that small, correct programs pass within the limits.

    Raises:
      SandboxError: they fail, so all other code would fail as well.
    """
    program = parse_tests([{"input": "6 7\n", "output": "42\n"}])
    function = parse_tests([{"call": "product", "args": [6, 7], "output": 42}])
    codes = {
        "a, b = map(int, input().split())\nprint(a * b)": program,
        "def product(a, b): return a * b": function,
    }
    for code, tests in codes.items():
        if run_tests(sandbox, code, tests, _CHECK_SECONDS, _CHECK_SECONDS) != [True]:
            limits = dataclasses.asdict(sandbox.limits)
            shown = ", ".join(f"{name} {limits[name]}" for name in ("memory_mb", "processes", "file_mb"))
            raise SandboxError(f"task.sandbox: within {shown} not even a correct program passes; raise them")


def _outcome(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _close(value: Encoded, right: Encoded, relative: float, absolute: float) -> bool:
    if not isinstance(value, int | float) or not isinstance(right, int | float):
        return False
    try:
        return math.isclose(value, right, rel_tol=relative, abs_tol=absolute)
    except OverflowError:  # no float is as large
        return False


def _without_tuples(value: Encoded) -> Encoded:
    if not isinstance(value, list) or not value:
        return value
    tag, *items = value
    return ["l" if tag == "t" else tag, *map(_without_tuples, items)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _parse(tests: Any) -> Iterator[CodeTest]:
    match tests:
        case str():
            yield _parse_assert(tests)
        case list():
            for test in tests:
                yield from _parse(test)
        case {"inputs": list(inputs), "outputs": list(outputs)}:
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
            name = tests.get("fn_name")
            for question, right in zip(inputs, outputs, strict=True):
                if name is None:
                    yield from _parse({"input": question, "output": right})
                else:
                    [test] = _parse({"call": name, "args": question, "output": right})
                    yield dataclasses.replace(test, rule="json")
        case {"input": str(text), "output": str(right)}:
            yield CodeTest({"input": text}, right)
        case {"call": str(name), "args": list(args), "output": right}:
            yield CodeTest(_call(name, args), encode(right))
        case _:
            raise ValueError(
                f"{str(tests)[:80]} is no test; write {{input, output}} with text, {{call, args, output}},"
                " or 'assert f(...) == ...'"
            )


def _call(
    name: str, args: Sequence[Any], keywords: Mapping[str, Any] | None = None, within: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "call": name,
        "args": [encode(arg) for arg in args],
        "keywords": {key: encode(value) for key, value in (keywords or {}).items()},
        "within": list(within),
    }


def _parse_assert(text: str) -> CodeTest:
    """Reads one of the forms below. f(...) is a call of the tested code with literals, also by keyword. It
    and `literal` may be arguments of builtins such as `set` or `sorted`:

        assert f(...)           assert f(...) == literal    assert abs(f(...) - literal) < 1e-6
        assert not f(...)       assert f(...) != literal    assert math.isclose(f(...), literal)
        assert f(...) is None   assert literal == f(...)
    """
    fault = ValueError(f"{text[:80]!r} is not of the form 'assert f(literals) == literal'")
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=condition)]:
                test = _parse_condition(condition)
            case _:
                raise fault
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError):
        raise fault from None
    if test is None:
        raise fault
    return test


def _parse_condition(condition: ast.expr) -> CodeTest | None:
    """Reads a condition; raises a ValueError or returns None if its form is unknown."""
    match condition:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            question = _parse_call(left)
            if question is None:
                question, right = _parse_call(right), left
            return question and CodeTest(question, encode(_constant(right)))
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            question = _parse_call(left)
            return question and CodeTest(question, encode(_constant(right)), "unequal")
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left, ast.Sub(), right)], keywords=[]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[bound],
        ):
            question, tolerance = _parse_call(left), (0.0, float(_constant(bound)))
            return question and CodeTest(question, encode(_constant(right)), tolerance=tolerance)
        case ast.Call(
            func=ast.Name(id="isclose") | ast.Attribute(value=ast.Name(id="math"), attr="isclose"),
            args=[left, right],
            keywords=keywords,
        ):
            options = {"rel_tol": 1e-9, "abs_tol": 0.0}
            options |= {keyword.arg: float(_constant(keyword.value)) for keyword in keywords}
            relative, absolute = options.pop("rel_tol"), options.pop("abs_tol")
            question = None if options else _parse_call(left)
            return question and CodeTest(question, encode(_constant(right)), tolerance=(relative, absolute))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            question = _parse_call(operand)
            return question and CodeTest(question, False)
    question = _parse_call(condition)
    return question and CodeTest(question, True)


def _parse_call(node: ast.expr) -> dict[str, Any] | None:
    """Reads a call of the tested code, perhaps within builtins; returns None if there is none."""
    within = []
    while True:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Call() as inner], keywords=[]) if name in _WITHIN:
                within.append(name)
                node = inner
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name not in _WITHIN:
                named = {keyword.arg: _constant(keyword.value) for keyword in keywords}
                return None if None in named else _call(name, [_constant(arg) for arg in args], named, within)
            case _:
                return None


def _constant(node: ast.expr) -> Any:
    """Reads a literal, perhaps within builtins; raises a ValueError if there is none."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _WITHIN:
            return _WITHIN[name](_constant(inner))
    return ast.literal_eval(node)
