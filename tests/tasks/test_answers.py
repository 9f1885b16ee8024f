"""Answers in responses: one spelling for each, none from text without one."""

from rljax.tasks.answers import extracted_answer, last_answer
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.epochs import EpochTask
from rljax.tasks.rewards import text as rewards

ANSWERS = {
    r"so \boxed{12} no, \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    "first 3, then\n#### 1,234\nbye 9": "1234",
    "The answer is 7.": "7",
    "It costs $1,250.50 in all.": "1250.50",
    "from -3 to -4": "-4",
    r"\boxed{x + 1}": "x+1",
    r"cut off: 5 \boxed{6": "6",
    **dict.fromkeys(("no number", "", "####", r"\boxed{}")),
}


def test_last_answer():
    assert {text: last_answer(text) for text in ANSWERS} == ANSWERS


def test_the_task_knows_best():
    task = ChainArithmetic(seed=0)
    problem = task.problem("heldout", 0)
    assert extracted_answer(task, problem, problem.solution) == f"{int(problem.answer):02d}"
    assert extracted_answer(task, problem, "a1+2=3#7") == "07" == extracted_answer(task, problem, "#07\n")
    assert extracted_answer(task, problem, "12") is None
    assert extracted_answer(task, problem, "#123") is None
    assert extracted_answer(EpochTask(task, 4), problem, "12") is None  # not its last number


def test_equal_numbers_are_one_vote():
    vote = rewards.numeric().vote
    assert {vote(each) for each in ("it is 1,000", "1000", "1000.0", "2000/2", "1000, I think")} == {"1000"}
    assert vote("1001") == "1001" and vote("none") is None
    assert rewards.numeric(answer_in="boxed").vote(r"\boxed{x + 1}") == "x + 1"
    assert rewards.exact().vote(" Yes ") == "Yes" and rewards.exact(ignore_case=True).vote(" Yes ") == "yes"
