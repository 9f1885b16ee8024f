"""The chain arithmetic task: what it asks, what its solutions say, how it judges text it must not trust."""

import itertools
import re
import string

import numpy as np
import pytest

from rljax.tasks.base import SPLITS, Problem, Task, is_heldout
from rljax.tasks.chain_arithmetic import ChainArithmetic


def prompt_of(problem: Problem) -> str:
    (message,) = problem.messages
    assert message["role"] == "user"
    return message["content"]


def numbers_of(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """Takes "47a5b8=" apart into 47 and [("a", 5), ("b", 8)], independently of the task's code."""
    assert re.fullmatch(r"[0-9]{2}([A-Za-z][0-9]+)+=", prompt)
    first, rest = prompt[:2], prompt[2:-1]
    return int(first), [(name, int(term)) for name, term in re.findall(r"([A-Za-z])([0-9]+)", rest)]


def steps_of(solution: str) -> list[tuple[str, int, int, int]]:
    """Takes "a5+47=52b8+52=60#60" apart into [("a", 47, 5, 52), ("b", 52, 8, 60)]."""
    steps = re.findall(r"([A-Za-z])([0-9]+)\+([0-9]{2})=([0-9]{2})", solution)
    return [(name, int(total), int(term), int(result)) for name, term, total, result in steps]


def test_a_known_problem_never_changes():
    """Resume depends on these literals: a change here changes the data of every run."""
    assert isinstance(ChainArithmetic(seed=0), Task)
    problem = ChainArithmetic(seed=3).problem("heldout", 10)
    assert problem == Problem(
        id="heldout/10",
        messages=({"role": "user", "content": "44a3b1c9d2e6="},),
        answer="65",
        difficulty=6,
        solution="a3+44=47b1+47=48c9+48=57d2+57=59e6+59=65#65",
    )


def test_problems_depend_on_seed_split_and_index_alone():
    one, again, other = (ChainArithmetic(seed) for seed in (1, 1, 2))
    forwards = [one.problem("train", i) for i in range(50)]
    assert forwards == [again.problem("train", i) for i in reversed(range(50))][::-1]
    prompts = {
        prompt_of(task.problem(split, i)) for task in (one, other) for split in SPLITS for i in range(50)
    }
    assert len(prompts) > 225  # short chains may repeat by chance


def test_heldout_is_disjoint_from_the_other_splits_over_seeds():
    """Short chains: their few possible prompts would certainly collide if the splits were drawn alike."""
    prompts = {split: set() for split in SPLITS}
    for seed in range(3):
        task = ChainArithmetic(seed=seed, max_terms=2, max_number=3)
        for split in SPLITS:
            prompts[split] |= {prompt_of(task.problem(split, i)) for i in range(600)}
    assert len(prompts["heldout"]) > 30
    assert prompts["train"] & prompts["warm_start"]
    assert not prompts["heldout"] & (prompts["train"] | prompts["warm_start"])
    assert all(is_heldout(prompt) for prompt in prompts["heldout"])


@pytest.mark.parametrize("max_number", [1, 99])
def test_solutions_are_right_step_by_step(max_number):
    task = ChainArithmetic(seed=0, max_number=max_number)
    for split in ("train", "heldout"):
        for index in range(200):
            problem = task.problem(split, index)
            total, terms = numbers_of(prompt_of(problem))
            assert problem.difficulty == 1 + len(terms)
            assert [name for name, _ in terms] == list(string.ascii_letters[: len(terms)])
            assert all(1 <= term <= max_number for _, term in terms)
            steps = steps_of(problem.solution)
            assert len(steps) == len(terms)
            for (name, term), step in zip(terms, steps, strict=True):
                assert step == (name, total, term, (total + term) % 100)
                total = (total + term) % 100
            assert problem.answer == f"{total:02d}"
            assert problem.solution.endswith("#" + problem.answer)
            assert task.reward(problem, problem.solution) == {"reward": 1.0, "correct": 1.0, "format": 1.0}


def test_both_sides_of_the_split_have_the_same_lengths_and_a_long_tail():
    task = ChainArithmetic(seed=0)
    solutions = lambda split: [task.problem(split, index).solution for index in range(2000)]  # noqa: E731
    lengths = {split: np.array([*map(len, solutions(split))]) for split in ("train", "heldout")}
    for values in lengths.values():
        p75 = np.percentile(values, 75)
        assert 40 <= p75 <= 90
        assert 350 <= values.max() + 1 <= 384  # with the end-of-sequence token
        assert values.max() > 4 * p75
    assert abs(lengths["train"].mean() - lengths["heldout"].mean()) < 0.15 * lengths["train"].mean()


def test_the_number_of_terms_follows_the_power_law():
    task = ChainArithmetic(seed=0, max_terms=4, tail_exponent=1.0)
    counts = np.bincount([task.problem("train", i).difficulty for i in range(4000)], minlength=5)[2:]
    expected = np.array([1 / 2, 1 / 3, 1 / 4]) / (1 / 2 + 1 / 3 + 1 / 4)
    sigma = np.sqrt(4000 * expected * (1 - expected))
    assert np.all(np.abs(counts - 4000 * expected) < 4 * sigma)


@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0])
def test_demonstrations_slip_at_the_stated_rate(noise):
    task = ChainArithmetic(seed=0, demonstration_noise=noise)
    steps = [step for i in range(1000) for step in steps_of(task.problem("warm_start", i).solution)]
    offsets = [(result - total - term) % 100 for _, total, term, result in steps]
    rate, sigma = np.mean([offset != 0 for offset in offsets]), np.sqrt(noise * (1 - noise) / len(steps))
    assert abs(rate - noise) <= 4 * sigma
    assert set(offsets) == {0: {0}, 1: {1, 99, 10, 90}}.get(noise, {0, 1, 99, 10, 90})


def test_a_slip_runs_on_into_the_demonstrated_answer_but_not_into_the_right_one():
    task = ChainArithmetic(seed=0, demonstration_noise=0.3)
    wrong = 0
    for index in range(200):
        problem = task.problem("warm_start", index)
        first, terms = numbers_of(prompt_of(problem))
        assert int(problem.answer) == (first + sum(term for _, term in terms)) % 100
        steps = steps_of(problem.solution)
        for before, after in itertools.pairwise(steps):
            assert after[1] == before[3]
        assert problem.solution.endswith(f"#{steps[-1][3]:02d}")
        correct = float(steps[-1][3] == int(problem.answer))
        assert task.reward(problem, problem.solution)["correct"] == correct
        wrong += not correct
    assert wrong > 50


def test_demonstrations_check_themselves_as_often_as_stated_and_others_never():
    """Without that, they are as they were."""
    task = ChainArithmetic(seed=0, rechecks=0.5, demonstration_noise=0.1)
    rounds = []
    for index in range(600):
        problem = task.problem("warm_start", index)
        steps, _, answer = problem.solution.partition("#")
        chains = steps.split("?")
        names = [[name for name, *_ in steps_of(chain)] for chain in chains]
        assert names == names[:1] * len(chains) and len(names[0]) == problem.difficulty - 1
        assert len(names[0]) * len(chains) < task.max_terms
        assert int(answer) == steps_of(chains[-1])[-1][3]  # the last round counts
        assert task.reward(problem, problem.solution)["format"] == 1.0
        if problem.difficulty <= 5:
            rounds.append(len(chains))
        assert "?" not in task.problem("train", index).solution
    rounds = np.asarray(rounds)
    for least in (1, 2, 3):  # from each round on, every other one goes on
        share, count = np.mean(rounds[rounds >= least] > least), np.sum(rounds >= least)
        assert abs(share - 0.5) < 4 * np.sqrt(0.25 / count)
    plain, checked = ChainArithmetic(seed=4), ChainArithmetic(seed=4, rechecks=0.7)
    for index in range(50):
        ours, theirs = (task.problem("warm_start", index).solution for task in (plain, checked))
        assert ours.partition("#")[0] == theirs.partition("#")[0].split("?")[0]
    assert plain.problem("train", 3) == checked.problem("train", 3)


PROBLEM = Problem(id="x", messages=({"role": "user", "content": "05a4="},), answer="09", difficulty=2)


JUDGED = {  # response: (correct, well formed)
    "a4+05=09#09": (1, 1),
    "a4+05=09#09\n": (1, 1),
    "#09": (1, 1),  # steps are not judged, the answer is
    "09#9": (1, 0),
    "so it is #09": (1, 0),
    "a4+05=10?a4+05=09#09": (1, 1),
    "08#08": (0, 1),
    "#09#08": (0, 0),  # no second guess
    "#08#09": (1, 0),
    "#٠٩": (0, 0),  # digits of another script
    "\ud800#09": (1, 0),  # half a surrogate pair, as undecodable bytes may leave
    **dict.fromkeys(("09", "", "#", "09#09#", "#09b", "#109", "#-9", "#0x9", "#09 or #10"), (0, 0)),
}


def test_reward():
    task = ChainArithmetic(seed=0, format_weight=0.25)
    for response, (correct, well_formed) in JUDGED.items():
        parts = task.reward(PROBLEM, response)
        reward = 0.75 * correct + 0.25 * well_formed
        assert parts == {"reward": reward, "correct": correct, "format": well_formed}, response
        assert all(isinstance(part, float) for part in parts.values())


def test_a_megabyte_of_garbage_is_judged_without_blowing_up():
    """Linear matching takes milliseconds here; quadratic matching, the usual mishap, takes hours."""
    task = ChainArithmetic(seed=0)
    for piece in ("#", "1", "#1", "1=", "#09", " ", "9" * 50 + "#", "\n", "é", "(((", "+-"):
        parts = task.reward(PROBLEM, piece * (1_000_000 // len(piece)))
        assert (parts["correct"], parts["format"]) == (float(piece == "#09"), 0.0)


def test_an_unknown_split_and_a_negative_index_are_refused():
    for split, index in (("test", 0), ("", 0), (None, 0), ("train", -1)):
        with pytest.raises(ValueError, match="index" if index < 0 else "split"):
            ChainArithmetic(seed=0).problem(split, index)
