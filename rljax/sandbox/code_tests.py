"""Unit tests of code that a response holds: the code runs in the sandbox, the verdict is found outside.

Forms of a test, in a dataset:

    {"input": "3 4\\n", "output": "7\\n"}              a program: standard input, and what it should print
    {"call": "add", "args": [3, 4], "output": 7}      a function, or a method of a class `Solution`
    "assert add(3, 4) == 7"                           the same as a call, as in MBPP; see `_parse_assert`
    {"inputs": [...], "outputs": [...], "fn_name": n} a whole list, as in APPS; without a name, of programs

A test is data: nothing of it is executed here, and of the right answer nothing goes into the sandbox. So code
that prints "all tests passed", leaves early or takes over the process that calls it has still not said what
its function returns.
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
_MAX_ANSWER = 1 << 18  # bytes of one test's answer beyond those of the longest right one
_WITHIN = {
    each.__name__: each
    for each in (abs, bool, float, frozenset, int, len, list, round, set, sorted, str, tuple)
}
_CHECK_SECONDS = 60.0
_READY = {"ready": True}


@dataclasses.dataclass(frozen=True)
class CodeTest:
    """One test.

    Attributes:
      question: what the sandbox is told, {"input": text} or a call (see code_runner.py), its values encoded.
      answer: the right output, or the right value, encoded.
      rule: how a value is judged. "equal": as `==` has it. "unequal": as `!=`. "json": equal, where a tuple
        counts as a list, and a right value that stands alone in a list as that value, too (APPS).
      tolerance: relative and absolute, of `math.isclose`: numbers are judged by it instead.
    """

    question: dict[str, Any]
    answer: Encoded
    rule: Literal["equal", "unequal", "json"] = "equal"
    tolerance: tuple[float, float] | None = None

    def passed(self, outcome: Any) -> bool:
        """Judges one line of the runner. White space at the end of a program's lines does not count."""
        if not isinstance(outcome, dict):
            return False
        if "input" in self.question:
            output = outcome.get("output")
            return isinstance(output, str) and _lines(output) == _lines(self.answer)
        try:
            return "value" in outcome and self._is_right(outcome["value"])
        except RecursionError:  # deeper than any right answer
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
    """Tests in any of the forms above; text is read as JSON, or as one `assert` a line.

    Raises:
      ValueError: what is wrong with them.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [line for line in tests.splitlines() if line.strip()]
    found = list(_parse(tests))
    if not found:
        raise ValueError("there are no tests")
    return found


def run_tests(
    sandbox: Sandbox, code: str, tests: Sequence[CodeTest], seconds_each: float, seconds: float
) -> list[bool]:
    """Returns whether the code passes each test; tests that do not run within `seconds` fail.

    Raises:
      SandboxError: the sandbox did not come as far as the code.
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
    ready, *outcomes = _outcomes(finished.output) or [None]
    if ready != _READY:
        raise SandboxError(
            f"task.sandbox: what runs tests did not begin ({finished.ending}): memory_mb"
            f" {sandbox.limits.memory_mb} is too little, or this machine has none left"
        )
    outcomes = [*outcomes, *[None] * len(tests)]
    return [test.passed(outcome) for test, outcome in zip(tests, outcomes, strict=False)]


def check_limits(sandbox: Sandbox) -> None:
    """Runs code that is right, which needs next to nothing.

    Raises:
      SandboxError: it fails, so all other code would as well.
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
            raise SandboxError(f"task.sandbox: within {shown} not even a right program passes; raise them")


def _outcomes(output: bytes) -> list[Any]:
    return [_outcome(line) for line in output.splitlines()]


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
            for given, right in zip(inputs, outputs, strict=True):
                if name is None:
                    yield from _parse({"input": given, "output": right})
                else:
                    [test] = _parse({"call": name, "args": given, "output": right})
                    yield dataclasses.replace(test, rule="json")
        case {"input": str(given), "output": str(right)}:
            yield CodeTest({"input": given}, right)
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
    """One of the forms below, where f(...) is a call of the tested code with literals, also by keyword, and
    may stand within builtins such as `set` or `sorted`; "literal" may so, too:

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
    """A ValueError or None where it is of no known form."""
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
            given = {"rel_tol": 1e-9, "abs_tol": 0.0}
            given |= {each.arg: float(_constant(each.value)) for each in keywords}
            relative, absolute = given.pop("rel_tol"), given.pop("abs_tol")
            question = None if given else _parse_call(left)
            return question and CodeTest(question, encode(_constant(right)), tolerance=(relative, absolute))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            question = _parse_call(operand)
            return question and CodeTest(question, False)
    question = _parse_call(condition)
    return question and CodeTest(question, True)


def _parse_call(node: ast.expr) -> dict[str, Any] | None:
    """A call of the tested code, perhaps within builtins; None where it is none."""
    within = []
    while True:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Call() as inner], keywords=[]) if name in _WITHIN:
                within.append(name)
                node = inner
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name not in _WITHIN:
                given = {keyword.arg: _constant(keyword.value) for keyword in keywords}
                return None if None in given else _call(name, [_constant(arg) for arg in args], given, within)
            case _:
                return None


def _constant(node: ast.expr) -> Any:
    """A literal, perhaps within builtins; a ValueError where it is none."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _WITHIN:
            return _WITHIN[name](_constant(inner))
    return ast.literal_eval(node)
