"""Verifiable instructions: what is asked, and what keeps to it."""

import pytest

from rljax.tasks.base import SPLITS, Problem
from rljax.tasks.instructions import RULES, Instructions
from rljax.tasks.registry import make_task

KEPT = {  # one text that keeps to a rule about the word "river", and texts that break it
    "begin": ("River water runs fast.", ["The river runs fast.", "Rivers run fast here."]),
    "capitals": ("THE RIVER RUNS FAST.", ["The river runs fast.", "THE RIVER RUNS FASt."]),
    "end": ("Fast runs the river.", ["Fast runs the riverbed.", "A river runs fast."]),
    "exclamation": ("How fast the river runs!", ["How fast! The river runs.", "Is the river fast?"]),
    "include": ("A fast 'River' runs here.", ["Rivers run fast here.", "A riverbed runs here fast."]),
    "lowercase": ("the river runs fast.", ["The river runs fast.", "the river runs fast, I say."]),
    "no_commas": ("The river runs fast.", ["The river, as ever, runs.", "Fast, fast river water."]),
    "question": ("How fast is the river?", ["How fast? The river runs.", "It is a fast river!"]),
    "without_the": ("Rivers run fast there.", ["The river runs fast.", "Fast runs the river."]),
}

PASSED = {"reward": 1.0, "length": 1.0, "varied": 1.0, "about": 1.0, "rules": 1.0}


def problem(*names, words=(3, 8), word="river"):
    data = {"topic": "rive", "words": words, "rules": [(name, word) for name in names]}
    return Problem("train/0", (), "", 1, data=data)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_kept_or_broken(name):
    kept, broken = KEPT[name]
    task = Instructions(0, list(RULES))
    assert task.reward(problem(name), f" {kept}\n") == PASSED
    for text in broken:
        assert task.reward(problem(name), text) == PASSED | {"reward": 0.0, "rules": 0.0}, text


SHORT = {"reward": 0.0, "length": 0.0}
NOTHING = SHORT | {"about": 0.0, "rules": 0.0}
JUDGED = {
    "Fast runs the river!": {},
    "Fast runs the river.": {"reward": 0.0, "rules": 0.5},
    "The river!": SHORT,
    "Nobody ever saw how very fast runs the river!": SHORT,
    "Don't: well-kept river!": {},  # three words
    "River and river and the and!": {},  # short words may come back
    "River, river, my river!": {"reward": 0.0, "varied": 0.0},
    "Fast runs all water!": {"reward": 0.0, "about": 0.0, "rules": 0.5},
    "Three words on the river!": {"reward": 0.0, "about": 0.0},
    "": NOTHING,
    "...!": NOTHING,
}


def test_a_reward_needs_every_rule_and_the_number_of_words():
    task = Instructions(0, ["end", "exclamation"], 2)
    for text, expected in JUDGED.items():
        assert task.reward(problem("include", "exclamation"), text) == PASSED | expected, text


def test_problems_are_what_they_say():
    """The prompt names the words and every rule; rules that exclude each other never meet."""
    task = make_task("instructions", seed=1, rules=list(RULES), max_rules=3)
    counts = set()
    for index in range(300):
        made = task.problem("train", index)
        (message,), (low, high), rules = made.messages, made.data["words"], made.data["rules"]
        names = [name for name, _ in rules]
        assert f"of {low} to {high} words" in message["content"] and 4 <= low < high <= 25
        assert all(RULES[name][0].format(word=word) in message["content"] for name, word in rules)
        assert not {"capitals", "lowercase"} <= set(names) and not {"question", "exclamation"} <= set(names)
        assert made.data["topic"] in message["content"]
        assert len(set(names)) == len(names) == made.difficulty
        counts.add(len(names))
        assert made == task.problem("train", index)
    assert counts == {1, 2, 3}
    prompts = {
        split: {task.problem(split, index).messages[0]["content"] for index in range(300)} for split in SPLITS
    }
    assert not prompts["train"] & prompts["heldout"]
