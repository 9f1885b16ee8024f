"""Prompts that are too long: left out, with the next problem in their place, or an error."""

import pytest

from rljax.errors import UserError
from rljax.rollout.prompts import Prompts
from rljax.tasks.base import Problem


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode_chat(self, messages):
        return [ord(character) for message in messages for character in message["content"]]


class Lengths:
    """A task whose problem i has a prompt of `lengths[i mod n]` characters."""

    def __init__(self, lengths, finite=True):
        self.lengths = lengths
        if finite:
            self.finite_problems = lambda: [self.problem("train", i) for i in range(len(lengths))]

    def problem(self, split, index):
        text = "x" * self.lengths[index % len(self.lengths)]
        return Problem(f"{split}/{index}", ({"role": "user", "content": text},), "", 0)


def prompts(lengths, leave_out=True, finite=True):
    return Prompts(Lengths(lengths, finite), Characters(), 4, leave_out)


def test_the_next_problem_takes_the_place_of_one_that_is_too_long():
    asked = prompts([1, 9, 4, 5, 2])
    assert asked.next_problems("train", 0, 3) == ([0, 2, 4], 5)
    assert asked.next_problems("train", 3, 2) == ([4, 5], 6)  # a resumed run goes on from its position
    assert prompts([1, 9, 4], leave_out=False).next_problems("train", 1, 2) == ([1, 2], 3)
    said = []
    prompts([1, 9, 7]).check(said.append)
    assert len(said) == 1 and "2 of 3 prompts are longer" in said[0] and said[0].endswith("They are left out")


def test_held_out_problems_are_those_that_fit():
    task, said = Lengths([1, 9, 4]), []
    problems = {i: task.problem("heldout", i) for i in range(3)}
    assert list(prompts([1, 9, 4]).fitting(problems, said.append)) == [0, 2]
    assert said == [
        "1 of 3 held-out prompts are left out: they have more than 4 tokens (rollout.max_prompt_length)"
    ]
    with pytest.raises(UserError, match="all 1 held-out prompts are longer"):
        prompts([9]).fitting({1: problems[1]}, said.append)


@pytest.mark.parametrize(
    ("lengths", "leave_out", "finite", "says"),
    [
        ([1, 9, 7], False, True, "2 of 3 prompts are longer; that of problem train/1 has 9 tokens. Raise"),
        ([9, 7], True, True, "2 of 2 prompts are longer; .* None is left"),
        ([9], False, False, "the prompt of problem train/0 has 9 tokens; .* rollout.long_prompts: leave_out"),
        ([9], True, False, "10,000 train prompts in a row, the last that of problem train/9999, are longer"),
    ],
)
def test_what_cannot_be_asked_is_one_line(lengths, leave_out, finite, says):
    with pytest.raises(UserError, match=says) as caught:
        prompts(lengths, leave_out, finite).check(lambda line: None)
    assert "\n" not in str(caught.value)
