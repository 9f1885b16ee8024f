"""Rewards: what each gives by hand-computed examples, how they add up, and what happens when one fails."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from rljax.assembly.task import configured_task
from rljax.config import TaskConfig
from rljax.errors import ConfigError, UserError
from rljax.sandbox.process import SandboxError
from rljax.tasks.answers import last_answer
from rljax.tasks.base import Problem
from rljax.tasks.reasoning_gym import ReasoningGym
from rljax.tasks.rewards import failures, text
from rljax.tasks.rewards.extraction import answer_finder, last_code_block, last_formula
from rljax.tasks.rewards.pool import CheckerPool
from tests.configs import table
from tests.sandbox.processes import namespaces

HERE = "tests.tasks.reward_functions"
SANDBOX = {"allow_weak": not namespaces()}


def problem(answer):
    return Problem("p", ({"role": "user", "content": "?"},), answer, 0)


@pytest.fixture
def make(tmp_path):
    """A task of three problems with the given rewards; ended with the test."""
    made = []

    def make_task(*rewards, rows=None, **section):
        rows = rows or [{"prompt": f"{i}+{i}?", "answer": str(2 * i)} for i in range(3)]
        args = {}
        for name, content in (("path", rows), ("heldout_path", [{**rows[0], "prompt": "held out"}])):
            args[name] = str(tmp_path / f"{name}.jsonl")
            Path(args[name]).write_text("".join(json.dumps(row) + "\n" for row in content))
        config = {"name": "dataset", "args": args, "rewards": list(rewards), "sandbox": SANDBOX}
        reports = []
        task = configured_task(TaskConfig.model_validate(config | section), 0, reports.append)
        task.reports, task.args = reports, args
        made.append(task)
        return task

    yield make_task
    for task in made:
        task.close()


RESPONSE = "So \\boxed{\\frac{1}{2}}.\n<answer> 7 </answer>\nThat is 1,234.5 #### 9 apples\n\n"


PLACES = {"response": RESPONSE.strip(), "line": "That is 1,234.5 #### 9 apples", "number": "9"}
PLACES |= {"boxed": "\\frac{1}{2}", "tag": "7", "marker": "9 apples"}


@pytest.mark.parametrize("place", PLACES)
def test_where_an_answer_stands(place):
    answer = PLACES[place]
    assert answer_finder(place)(RESPONSE) == answer
    assert answer_finder(place)("") is None
    twice = RESPONSE.replace("7", "8").replace("9", "3").replace("1}", "5}") + RESPONSE
    assert answer_finder(place)(twice) == (twice.strip() if place == "response" else answer)
    if place in ("boxed", "tag", "marker"):
        for cut_off in ("\\boxed{1", "<answer>7", "7</answer>", "####", "</answer><answer>"):
            assert answer_finder(place)(cut_off) is None


def test_finding_an_answer_takes_linear_time():
    for evil in ("1" * 40_000, "1," * 40_000, "1." * 40_000, "-" * 40_000, "\\boxed{" * 10_000,
                 "<answer>" * 10_000, "1,/" * 18_000, "1" + ",22" * 18_000, "</think>" * 10_000,
                 "\\boxed{1} " * 10_000, "= -" * 18_000,
                 "\\boxed{1}" + " " * 40_000 + "\\boxed{1}"):  # fmt: skip
        start = time.process_time()
        for place in ("number", "boxed", "tag", "marker", "line"):
            answer_finder(place)(evil)
        last_formula(evil), last_answer(evil)
        text.numeric()(problem("1"), evil)
        assert time.process_time() - start < 0.5


def test_code_is_the_last_closed_block():
    assert last_code_block("a\n```python\nx\n```\nb\n```\ny\n  z\n```\n") == "y\n  z\n"
    assert last_code_block("x = 1") == "x = 1"
    assert last_code_block("```python\nx\n```\n```\ncut off") == "x\n"


EXACT = [  # right answer, response, arguments
    ("2", "2\n", {}),
    ("Paris", " paris ", {"ignore_case": True}),
    ("7", RESPONSE, {"answer_in": "tag"}),
    ("-5", "\u22125", {}),
    ("\uff11\uff12", "12", {}),
    ("1,234", "1\u202f234", {}),
    ("New York", "New\u00a0York", {}),
    ("7", "<think>\\boxed{5}</think>\\boxed{7}", {"answer_in": "boxed"}),
]
NOT_EXACT = [
    ("2", "2.0", {}),
    ("", "", {}),
    ("Paris", "paris", {}),
    ("7", "", {"answer_in": "tag"}),
    ("5", "\u22125", {}),
    ("5", "it is \u22125", {"answer_in": "number"}),
    ("5", "<think>\\boxed{5}</think> I cannot tell", {"answer_in": "boxed"}),
]


def test_exact():
    for value, rows in ((1, EXACT), (0, NOT_EXACT)):
        for right, response, args in rows:
            assert text.exact(**args)(problem(right), response) == value, response


EQUAL = {  # right answer: numbers that are it
    "1234.5": ["it is 1,234.50"],
    "0.5": ["1/2", "50%", "It is .5", "1\u20442"],
    "1e-05": ["0.00001", "1e\u22125"],
    "1e+16": ["10,000,000,000,000,000"],
    "1000": ["about 1e3"],
    "5": ["so...5", "- 5 apples", "5, I think"],  # the bullet of a list
    "10": ["5-10", "5\u221210"],
    "-3": ["-3.0"],
    "$18": ["18"],
    "18": ["18 cm"],
    "-5": [f"it is {minus}5." for minus in "-\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"],
    "\u22125": ["-5", "x = - 5", "-$5", "\u2212\\$5"],
    "12345.5": [f"about 12{comma}345.5" for comma in ",'\u2019\u2009\u202f\u00a0"],
    "12345": ["$12{,}345$", "$12\\,345$", "$12,\\!345$"],
    "100000": ["1,00,000 rupees"],
    "2": ["the roots are 1,2"],
    "12": ["\uff11\uff12"],
    "50%": ["0.5", "it is 50%", "it is 50 %", "it is $50\\%$", "it is 50 percent", "it is 1/2"],
}
OTHER = {
    "2": ["1e" + "9" * 50, "1/0", "9" * 100_000, "none"],
    "3": ["-3"],
    "0.1": ["0.10000000000000001"],
    "5": ["it is \u22125"],
    "-5": ["5"],
    "12": ["the roots are 1,2"],
    "50": ["50 %"],  # a percent is a hundredth, whoever writes it
}
WITH_ARGUMENTS = [
    ("2", "1e999999999", {"answer_in": "response"}, 0),
    ("3.14159", "3.14", {"tolerance": 0.01}, 1),
    ("3.14159", "3.2", {"tolerance": 0.01}, 0),
    ("1000", "1009", {"relative": 0.01}, 1),
    ("1000", "1011", {"relative": 0.01}, 0),
    ("18", RESPONSE, {"answer_in": "marker", "marker": "is"}, 0),
    ("18", "18 cm", {"answer_in": "line"}, 0),  # with a unit it is no number
    ("18", "\\$18", {"answer_in": "line"}, 1),
]


def test_numeric():
    for value, table_of in ((1, EQUAL), (0, OTHER)):
        for right, responses in table_of.items():
            for response in responses:
                assert text.numeric()(problem(right), response) == value, (right, response[:99])
    for right, response, args, value in WITH_ARGUMENTS:
        assert text.numeric(**args)(problem(right), response) == value


FORMULAS = {
    r"I get \boxed{3}. Wait, no. So the answer is \boxed{2}.": r"\boxed{2}",
    r"<think>maybe \boxed{5}?</think> The answer is $7$.": " The answer is $7$.",
    r"maybe \boxed{5}?</thinking>The answer is $7$.": "The answer is $7$.",
    r"It is \boxed{5}</think>": "",
    r"first \boxed{9}, then $\boxed{\frac{1}{2}}$ or $\boxed{-1}$.": r"\boxed{\frac{1}{2}}, \boxed{-1}",
    r"\boxed{1} \text{ and } \boxed{2}": r"\boxed{1}, \boxed{2}",
    r"\boxed{\boxed{2}}": r"\boxed{2}",
    r"\boxed{3}, no, \boxed{2": r"\boxed{2",
    "$3$, no, $2$": "$3$, no, $2$",
}


def test_where_the_last_formula_stands():
    assert {response: last_formula(response) for response in FORMULAS} == FORMULAS


def test_length():
    for characters, value in ((0, 1), (10, 1), (15, 0.75), (30, 0), (99, 0)):
        assert text.length(target=10, limit=30)(problem(""), "x" * characters) == value


def test_rewards_add_up_by_weight(make):
    task = make(
        {"name": "exact", "args": {"answer_in": "number"}},
        {"name": "length", "weight": -0.5, "args": {"target": 4, "limit": 8}},
        {"name": "format", "weight": 0.25, "args": {"pattern": "[a-z ]*[0-9]+"}},
        {"name": f"{HERE}:brevity", "weight": 2, "args": {"scale": 3}, "label": "short"},
    )
    asked = task.problem("train", 0)
    parts = {"exact": 1.0, "length": 0.5, "format": 1.0, "short": 3 / 6, "errors": 0.0, "timeouts": 0.0}
    parts |= {"exact/answer_found": 1.0, "format/answer_found": 1.0}
    response = "x" * (5 - len(asked.answer)) + " " + asked.answer
    assert task.reward(asked, response) == {"reward": 1.0 - 0.25 + 0.25 + 1.0, **parts}
    assert task.reports == []
    assert task.extracted_answer(asked, "first 3, then 12") == "12"


def test_many_responses_keep_their_order_and_are_computed_in_parallel(make):
    task = make({"name": f"{HERE}:everything"}, {"name": f"{HERE}:where"}, reward_workers=2)
    problems = [task.problem("train", i % 3) for i in range(60)]
    texts = [each.answer if i % 7 == 0 else "no" for i, each in enumerate(problems)]
    judged = task.rewards(list(zip(problems, texts, strict=True)))
    assert [parts["everything"] for parts in judged] == [float(i % 7 == 0) for i in range(60)]
    processes = {parts["where"] for parts in judged}
    assert len(processes) <= 2 and os.getpid() not in processes


def test_a_worker_is_used_again_and_ends_with_its_task(make, monkeypatch):
    """And a function is called with the keywords that it names."""
    pools, real = [], CheckerPool.__init__
    monkeypatch.setattr(
        CheckerPool, "__init__", lambda self, *given: (real(self, *given), pools.append(self))[0]
    )
    task = make({"name": f"{HERE}:calls_so_far"}, {"name": f"{HERE}:anything"}, reward_workers=1)
    judged = [task.reward(problem("1"), "x") for _ in range(3)]
    assert [(parts["calls_so_far"], parts["anything"]) for parts in judged] == [(1, 4), (2, 4), (3, 4)]
    (pool,) = pools
    assert pool.close.alive
    task.close()
    assert not pool.close.alive


FAILURES = {
    "raise": "raised KeyError('a bug')",
    "exit": "ended its worker process",
    "die": "ended its worker process",
    "hang": "took more than 1 seconds (task.reward_timeout)",
    "spin": "took more than 1 seconds (task.reward_timeout)",
    "text": 'it returned "1", not a number',
    "nan": "returned nan",
    "pair": "it returned a tuple, not a number",
    "parts": "it returned a mapping without 'score', only 'acc'",
}


def test_a_reward_that_fails_counts_as_zero_and_is_counted_and_reported(make):
    task = make(
        {"name": f"{HERE}:moody", "weight": 2}, {"name": "length", "args": {"target": 9, "limit": 10}},
        reward_timeout=1.0, reward_errors="zero", reward_workers=1,
    )  # fmt: skip
    asked = task.problem("train", 0)
    texts = ["fine", *FAILURES, "fine"]
    start = time.monotonic()
    judged = task.rewards([(asked, each) for each in texts])
    assert time.monotonic() - start < 60
    good = {"reward": 3.0, "moody": 1.0, "length": 1.0, "errors": 0.0, "timeouts": 0.0}
    zero = {"reward": 1.0, "moody": 0.0, "length": 1.0}
    slow = [what.startswith("took") for what in FAILURES.values()]
    bad = [zero | {"errors": float(not hung), "timeouts": float(hung)} for hung in slow]
    assert judged == [good, *bad, good]
    for (name, what), report in zip(FAILURES.items(), task.reports, strict=True):
        prompt = json.dumps(asked.messages[0]["content"])
        assert report.startswith("task.rewards.0 (moody): ") and what in report
        assert f'problem {asked.id}, prompt {prompt}, response "{name}"' in report and "\n" not in report


def test_a_response_that_a_reward_declines_is_left_out_and_is_not_zero(make):
    """None by itself, and what fails where the config says so; a reward without weight decides nothing."""
    rewards = {"name": f"{HERE}:moody"}, {"name": "length", "args": {"target": 9, "limit": 10}}
    texts = ["fine", "nothing", "nan", "raise"]
    task = make(*rewards, reward_errors="decline")
    judged = task.rewards([(task.problem("train", 0), each) for each in texts])
    assert [parts["reward"] for parts in judged] == [2.0, None, None, None]
    assert [parts["moody"] for parts in judged] == [1.0, None, None, None]
    assert [parts["length"] for parts in judged] == [1.0] * 4
    assert [parts["errors"] for parts in judged] == [0.0, 0.0, 1.0, 1.0] and len(task.reports) == 2
    task = make({**rewards[0], "weight": 0.0}, rewards[1])
    assert task.reward(task.problem("train", 0), "nothing")["reward"] == 1.0


def test_coroutine_functions_run_together_and_return_parts(make):
    """Three at a time, for as long as each waits for two others; one that never ends and one that ends its
    process take no other response with them.
    """
    reward = {"name": f"{HERE}:together", "args": {"size": 3}, "label": "own"}
    task = make(reward, reward_parallel=3, reward_errors="zero", reward_timeout=2.0)
    asked = task.problem("train", 0)
    judged = task.rewards([(asked, f"{number}") for number in range(9)])
    good = {"reward": 0.5, "own": 0.5, "own/most": 3.0, "own/acc": 1.0, "errors": 0.0, "timeouts": 0.0}
    assert judged == [good] * 9
    texts = ["alone", "raise", "nothing", "hang", "die", "alone"]
    judged = task.rewards([(asked, each) for each in texts])
    assert [parts["own"] for parts in judged] == [0.5, 0.0, None, 0.0, 0.0, 0.5]
    assert [parts["errors"] for parts in judged] == [0, 1, 0, 0, 1, 0]
    assert [parts["timeouts"] for parts in judged] == [0, 0, 0, 1, 0, 0]


def test_a_function_of_a_file_by_its_path(make, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "myrew.py").write_text("from beside import VALUE\ndef f(response): return VALUE\n")
    (folder / "beside.py").write_text("VALUE = 0.25\n")
    monkeypatch.chdir(tmp_path)
    task = make({"name": "./mine/myrew.py:f"}, {"name": f"{folder}/myrew.py:f", "label": "same"})
    parts = task.reward(task.problem("train", 0), "x")
    assert (parts["f"], parts["same"]) == (0.25, 0.25)


def test_a_reward_that_fails_stops_the_run_with_its_prompt(make):
    task = make({"name": f"{HERE}:moody"})
    asked = task.problem("train", 0)
    with pytest.raises(UserError) as caught:
        task.rewards([(asked, "fine"), (asked, "raise " + "x" * 1000)])
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    prompt = json.dumps(asked.messages[0]["content"])
    assert message.startswith("task.rewards.0 (moody): raised KeyError('a bug'); problem path.jsonl:")
    for part in (f'prompt {prompt}, response "raise xxx', "task.reward_errors: zero"):
        assert part in message
    task = make({"name": f"{HERE}:moody"}, reward_errors="zero")
    task.rewards([(asked, "raise")] * 30)  # reports end where they would be noise
    assert len(task.reports) == failures.REPORTED + 1 and "only counted" in task.reports[-1]


def test_a_response_that_a_reward_takes_too_long_over_does_not_end_the_run(make):
    """Also where it is a pattern that would go on for ever."""
    slow, format_ = {"name": f"{HERE}:moody"}, {"name": "format", "args": {"pattern": "(a+)+b"}}
    task = make(slow, format_, reward_timeout=0.5)
    asked = task.problem("train", 0)
    start = time.monotonic()
    judged = task.rewards([(asked, "hang"), (asked, "fine"), (asked, "a" * 60), (asked, "aab")])
    assert time.monotonic() - start < 20
    names = ("moody", "format", "timeouts", "errors")
    found = [tuple(parts[name] for name in names) for parts in judged]
    assert found == [(0, 0, 1, 0), (1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0)]
    assert len(task.reports) == 2 and "took more than 0.5 seconds" in task.reports[0]
    with pytest.raises(UserError, match=r"took more than .*task\.reward_timeouts: zero"):
        make(slow, reward_timeout=0.5, reward_timeouts="stop").reward(asked, "hang")


def test_code(make):
    rows = [{"prompt": "add", "answer": "", "tests": ["assert add(1, 2) == 3", "assert add(1, -1) == 0"]}]
    share = {"name": "code", "label": "share", "args": {"partial": True, "seconds": 0.5}}
    task = make({"name": "code"}, share, rows=rows)
    asked = task.problem("train", 0)
    good, half = "def add(a, b): return a + b", "def add(a, b): return a + abs(b)"
    forged = "print('all tests passed')\nimport os; os._exit(0)"
    blocks = [f"Here:\n```python\n{code}\n```\nDone." for code in (good, half, forged)]
    judged = task.rewards([(asked, block) for block in blocks])
    assert [(parts["code"], parts["share"]) for parts in judged] == [(1, 1), (0, 0.5), (0, 0)]


def test_math(make):
    """Also what sympy would evaluate: it runs in the sandbox, where it can do nothing and ends in time.
    Answers that it cannot read are told before any response is judged.
    """
    pytest.importorskip("math_verify")
    answers = ["\\frac{1}{2}", "7", "\\text{}", "$x^2$", "$$", "\\text{}"]
    rows = [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    section = {"rows": rows, "reward_timeout": 3.0, "reward_workers": 1}
    says = r"no formula in the answer .*text.*, which task\.rewards\.0 needs; there are 2 such"
    with pytest.raises(ConfigError, match=says):
        make({"name": "math"}, **section)
    task = make({"name": "math"}, reward_errors="zero", **section)
    assert len(task.reports) == 1 and re.search(says, task.reports[0])
    asked = problem(answers[0])
    right = ["$\\frac{2}{4}$", "The answer is \\boxed{0.5}", "0.50"]
    wrong = ["$\\frac{1}{3}$", "", "\\boxed{", "__import__('os').system('true')", "\\boxed{2 +}"]
    judged = task.rewards([(asked, each) for each in right + wrong])
    assert [parts["math"] for parts in judged] == [1.0] * len(right) + [0.0] * len(wrong)
    assert [parts["errors"] for parts in judged] == [0.0] * len(judged)
    assert [parts["math/answer_found"] for parts in judged[:6]] == [1.0] * 4 + [0.0] * 2
    pairs = [
        ("2", r"I get \boxed{3}. Wait, that is wrong. So the answer is \boxed{2}.", 1),
        ("3", r"I get \boxed{3}. Wait, that is wrong. So the answer is \boxed{2}.", 0),
        ("7", r"<think>maybe \boxed{5}?</think> The answer is $7$.", 1),
        ("5", r"<think>maybe \boxed{5}?</think> The answer is $7$.", 0),
        (r"\{1, 2\}", r"\boxed{1} and \boxed{2}", 1),
        ("2", "so $3$, no, $2$", 1),
        ("-5", "it is \u22125", 1),
        ("5", "it is \u22125", 0),
        ("12345", "12\u202f345", 1),
        (r"18\text{ cm}", "18", 1),
    ]
    judged = task.rewards([(problem(right), response) for right, response, _ in pairs])
    assert [parts["math"] for parts in judged] == [value for *_, value in pairs]
    start = time.monotonic()
    hard = task.reward(asked, "$9^{9^{9^{9^{9}}}}$")
    assert hard["math"] == 0.0 and time.monotonic() - start < 20
    assert task.reward(asked, "0.5")["math"] == 1.0
    assert task.extracted_answer(asked, right[1]) == "0.5"


def test_reasoning_gym(tmp_path):
    """The environment's score; string_insertion evaluates the answer as Python."""
    create_dataset = pytest.importorskip("reasoning_gym").create_dataset
    section = {"name": "reasoning_gym", "args": {"environment": "string_insertion"}, "reward_workers": 1}
    section["sandbox"] = SANDBOX
    task = configured_task(TaskConfig.model_validate(section), 0)
    try:
        asked = task.problem("train", 5)
        assert asked == ReasoningGym(0, "string_insertion").problem("train", 5)
        heldout = {task.problem("heldout", i).messages[-1]["content"] for i in range(20)}
        assert not heldout & {task.problem("train", i).messages[-1]["content"] for i in range(20)}
        assert "<answer>" in asked.messages[0]["content"]
        mark = tmp_path / "escaped"
        evil = f"<answer>[open({str(mark)!r}, 'w').write('x')]</answer>"
        judged = task.rewards([(asked, each) for each in (f"<answer>{asked.answer}</answer>", "none", evil)])
        good = {"reward": 1.0, "score": 1.0, "score/answer_found": 1.0, "errors": 0.0, "timeouts": 0.0}
        assert judged[0] == good and judged[1]["score/answer_found"] == 0.0
        assert judged[1]["score"] == 0.0 and judged[2]["score"] < 1.0 and not mark.exists()
        direct = create_dataset("string_insertion", seed=0, size=1)
        direct.score_answer(f"[open({str(mark)!r}, 'w').write('x')]", direct[0])
        assert mark.exists()  # so it is what the sandbox prevents
    finally:
        task.close()


IMPOSSIBLE = """
{name: exactly} -> task.rewards.0.name: unknown reward 'exactly' -> did you mean 'exact'?
{name: exact, args: {answer_in: head}} -> task.rewards.0.args.answer_in: -> 'head'
{name: length, args: {target: 5, limit: 5}} -> task.rewards.0.args.limit: 5
{name: format, args: {pattern: (a}} -> task.rewards.0.args.pattern: is no regular
{name: code} -> path.jsonl:1: there is no column 'tests' -> task.rewards.0
{name: task} -> task.rewards.0.name: task dataset has no reward of its own
{name: ':f'} -> task.rewards.0.name: write a function as module:function
{name: 'no_such_module:f'} -> task.rewards.0.name: no_such_module:f: importing -> ModuleNotFound
{name: 'HERE:absent'} -> task.rewards.0.name: -> HERE has no absent
{name: './absent.py:f'} -> task.rewards.0.name: ./absent.py:f: there is no file ./absent.py in
{name: 'HERE:NOT_A_FUNCTION'} -> task.rewards.0.name: -> is a int, not a function
{name: 'HERE:no_response'} -> task.rewards.0.name: -> takes no keyword `response`
{name: 'HERE:too_many'} -> task.rewards.0.name: -> cannot be called -> 'what'
{name: 'HERE:brevity', args: {scal: 3}} -> task.rewards.0.name: -> 'scal'
""".replace("HERE", HERE)


@pytest.mark.parametrize("row", table(IMPOSSIBLE), ids=lambda row: row[0])
def test_a_reward_that_cannot_be_is_one_error_at_the_start(make, row):
    reward, *says = row
    with pytest.raises(ConfigError) as caught:
        make(yaml.safe_load(reward))
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_a_dataset_needs_a_reward_and_numbers_where_numbers_are_judged(make):
    with pytest.raises(ConfigError, match=r"^task.rewards: task dataset has no reward of its own; list"):
        make()
    rows = [{"prompt": "a", "answer": "2"}, {"prompt": "b", "answer": "two"}]
    with pytest.raises(ConfigError, match=r"path.jsonl:2: the answer 'two' is not a number, which task"):
        make({"name": "numeric"}, rows=rows)
    args = make({"name": "exact"}, rows=rows).args
    part = {"name": "dataset", "args": args, "rewards": [{"name": "numeric"}]}
    says = r"the answer 'two' is not a number, which task\.mixture\.0\.rewards\.0"
    with pytest.raises(ConfigError, match=says):
        make(rows=rows, name="mixture", args={}, mixture=[part])
    rows[1]["answer"] = " "
    says = r"path.jsonl:2: the answer is empty, and task.rewards.0 judges by it"
    with pytest.raises(ConfigError, match=says):
        make({"name": "exact"}, rows=rows)
    bad = [{"prompt": "a", "answer": "", "tests": ["assert f(x) == 1"]}]
    with pytest.raises(ConfigError, match=r"jsonl:1: 'tests': .* is not of the form"):
        make({"name": "code"}, rows=bad)
    rows = [{"prompt": "add", "answer": "", "tests": ["assert add(1, 2) == 3"]}]
    with pytest.raises(SandboxError, match="file_mb 0 not even a correct program passes"):
        make({"name": "code"}, rows=rows, sandbox={**SANDBOX, "file_mb": 0})


def test_a_missing_package_names_its_extra(make, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    gym = TaskConfig(name="reasoning_gym", args={"environment": "leg_counting"})
    hub = TaskConfig(name="dataset", args={"hub": "some/name"})
    for says, call in (
        ("'rljax[math]'", lambda: make({"name": "math"})),
        ("'rljax[reasoning-gym]'", lambda: configured_task(gym, 0)),
        ("'rljax[datasets]'", lambda: configured_task(hub, 0)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert f"install the extra (pip install {says})" in str(caught.value)
