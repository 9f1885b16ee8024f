"""Unit tests of code that a response holds: the code runs in the sandbox, the verdict is found outside.

Forms of a test, in a dataset:

    {"input": "3 4\\n", "output": "7\\n"}              a program: standard input, and what it should print
    {"call": "add", "args": [3, 4], "output": 7}      a function, or a method of a class `Solution`
    "assert add(3, 4) == 7"                           the same as a call, as in MBPP; literals only
    {"inputs": [...], "outputs": [...], "fn_name": n} a whole list, as in APPS; without a name, of programs

A test is data: nothing of it is executed here, and of the right answer nothing goes into the sandbox. So code
that prints "all tests passed", leaves early or takes over the process that calls it has still not said what
its function returns.
"""

import ast
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax.sandbox.process import Sandbox
from rljax.sandbox.values import Encoded, encode, same

_SOURCES = ("values.py", "code_runner.py")
_MAX_ANSWER = 1 << 18  # bytes of one test's answer


@dataclasses.dataclass(frozen=True)
class CodeTest:
    """One test.

    Attributes:
      question: what the sandbox is told, {"input": text} or {"call": name, "args": [encoded, ...]}.
      answer: the right output, or the right value, encoded.
    """

    question: dict[str, Any]
    answer: Encoded

    def passed(self, outcome: Any) -> bool:
        """Judges one line of the runner. Of a program's output, white space at the end of lines does not"
        " count."""
        if not isinstance(outcome, dict):
            return False
        if "input" in self.question:
            output = outcome.get("output")
            return isinstance(output, str) and _lines(output) == _lines(self.answer)
        return "value" in outcome and same(outcome["value"], self.answer)


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
    """Which tests the code passes; tests that find no time within `seconds` fail."""
    request = {
        "code": code,
        "tests": [test.question for test in tests],
        "seconds": seconds_each,
        "max_output": _MAX_ANSWER,
    }
    source = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SOURCES)
    data = json.dumps(request).encode() + b"\n"
    finished = sandbox.run(source, data, seconds, 2 * _MAX_ANSWER * len(tests))
    outcomes = list(_outcomes(finished.output))[: len(tests)]
    outcomes += [None] * (len(tests) - len(outcomes))
    return [test.passed(outcome) for test, outcome in zip(tests, outcomes, strict=True)]


def _outcomes(output: bytes) -> Iterator[Any]:
    for line in output.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


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
                    yield from _parse({"call": name, "args": given, "output": right})
        case {"input": str(given), "output": str(right)}:
            yield CodeTest({"input": given}, right)
        case {"call": str(name), "args": list(args), "output": right}:
            yield CodeTest({"call": name, "args": [encode(arg) for arg in args]}, encode(right))
        case _:
            raise ValueError(
                f"{str(tests)[:80]} is no test; write {{input, output}} with text, {{call, args, output}},"
                " or 'assert f(...) == ...'"
            )


def _parse_assert(text: str) -> CodeTest:
    """`assert f(literals) == literal`, `assert f(literals)` or `assert not f(literals)`."""
    fault = ValueError(f"{text[:80]!r} is not of the form 'assert f(literals) == literal'")
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[right]))]:
                answer = ast.literal_eval(right)
            case [ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=call))]:
                answer = False
            case [ast.Assert(test=call)]:
                answer = True
            case _:
                raise fault
        match call:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                values = [encode(ast.literal_eval(arg)) for arg in args]
                return CodeTest({"call": name, "args": values}, encode(answer))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise fault from None
    raise fault
