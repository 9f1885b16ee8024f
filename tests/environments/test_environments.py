"""Environments: their episodes, the places where they run, and what happens where they fail."""

import itertools

import pytest
import yaml

from rljax.assembly.task import configured_task
from rljax.config import TaskConfig
from rljax.environments.episodes import Episodes
from rljax.environments.guess_number import GuessNumber
from rljax.environments.task import environment_of
from rljax.errors import ConfigError, UserError
from rljax.tasks.base import SPLITS, Problem, is_heldout
from tests.configs import table
from tests.environments.stand_ins import Counting

PATH = "tests.environments.stand_ins:Counting"


def make(name=PATH, said=print, **section):
    return configured_task(TaskConfig.model_validate({"name": name, "reward_workers": 1} | section), 0, said)


@pytest.fixture(scope="module")
def workers():
    said = []
    task = make(said=said.append, reward_timeout=1.0, reward_errors="zero")
    task.said = said
    yield task
    task.close()


def play(task, problem, turns, last=False):
    return [task.step("one", problem, turns[: n + 1], last) for n in range(len(turns))]


def test_an_episode_in_a_worker(workers):
    problem = workers.problem("train", 0)
    assert problem == Counting(0).problem("train", 0)
    assert workers.demonstration(problem) == ["3", "2", "1"]
    steps = play(workers, problem, ["3", "3", "2", "1"])
    assert [step.reward for step in steps] == [0.5, 0.0, 0.5, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[1].messages == [{"role": "user", "content": "2 left"}]
    assert steps[3].info == {"said": 4.0, "done": 1.0}


def test_what_a_policy_writes_ends_no_run(workers):
    """A turn that hangs or kills the process costs the episode its reward; other episodes go on, played again
    in a new process.
    """
    problem = workers.problem("train", 0)
    workers.step("other", problem, ["3"], False)
    assert workers.step("one", problem, ["hang"], False).failure == "timeouts"
    assert workers.step("one", problem, ["3", "die"], False).failure == "errors"
    assert workers.step("one", problem, ["raise"], False).failure == "errors"
    assert workers.step("other", problem, ["3", "2"], False).info["said"] == 2.0
    assert "took more than 1 seconds (task.reward_timeout); problem train/0, turn 1" in workers.said[0]


def test_the_turn_limit_asks_for_the_reward_of_an_episode_that_is_cut_off(workers):
    step = workers.step("one", workers.problem("train", 0), ["3"], True)
    assert step.reward == -0.5 and not step.done and step.info == {"said": 1.0, "done": 0.0, "cut": 1.0}


def test_a_lost_episode_is_played_again():
    environment = Counting(0)
    episodes, problem = Episodes(environment), environment.problem("train", 0)
    alone = [episodes.step("a", problem, ["3", "2", "1"][: n + 1], False) for n in range(3)]
    assert environment.resets == 1
    assert Episodes(environment).step("a", problem, ["3", "2", "1"], False) == alone[2]
    assert episodes.step("a", problem, ["3", "2", "1"], False) == alone[2]  # it had ended, and was forgotten


def test_a_step_that_is_none_is_the_environments_mistake():
    environment = Counting(0)
    for turn, says in (("nothing", "returned a NoneType, not a Step"), ("infinite", "inf, no finite number")):
        with pytest.raises((TypeError, ValueError), match=says):
            Episodes(environment).step("a", environment.problem("train", 0), [turn], False)


MISTAKES = """
{name: 'tests.environments.stand_ins:NoStep'} -> task.name: .* has no method step
{name: 'tests.environments.stand_ins:Absent'} -> task.name: .* has no Absent
{name: 'a:'} -> task.name: write it as module:name
{args: {second: 1}} -> task.name: .*cannot be called with its args
{args: {first: -1}} -> task.name: .*first is below 0
{name: guess_number, args: {number: 4}} -> task.args.number: .*did you mean 'numbers'[?]
{name: guess_numbr} -> task.name: .*did you mean 'guess_number'
{name: verifiers} -> task.args.environment: must be set for verifiers
{name: guess_number, rewards: [{name: exact}]} -> task.rewards: guess_number is an env
{name: mixture, mixture: [{name: guess_number}]} -> task.mixture.0.name: guess_number is an environment
"""


@pytest.mark.parametrize(("section", "says"), table(MISTAKES))
def test_a_mistake_is_one_line_that_names_the_key(section, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make(**yaml.safe_load(section))
    assert "\n" not in str(caught.value)


def test_an_environment_that_raises_stops_the_run_by_default():
    task = make("guess_number")
    says = r"task.name \(guess_number\): raised .*; problem train/0, turn 1"
    with pytest.raises(UserError, match=says) as e:
        task.step("a", Problem("train/0", (), "7", 0), ["7"], False)
    assert "task.reward_errors: zero" in str(e.value)
    with pytest.raises(UserError, match="rewards turns and not a text"):
        task.reward(task.problem("train", 0), "7")


def test_an_environment_in_epochs():
    task = make("guess_number", problems=3)
    assert environment_of(task) is not None and environment_of(make("chain_arithmetic")) is None
    assert task.problem("train", 4) == task.problem("train", 1)


# -- the environment of this package -------------------------------------------------------------------------


def test_a_known_problem_never_changes():
    """Resume depends on these literals: a change here changes the data of every run."""
    problem = GuessNumber(0).problem("train", 0)
    assert (problem.id, problem.messages[0]["content"], problem.answer) == ("train/0", "guess 27-41", "36")


def test_the_secret_is_in_the_range_and_the_splits_are_disjoint():
    environment = GuessNumber(1, numbers=16)
    for split, index in itertools.product(SPLITS, range(300)):
        problem = environment.problem(split, index)
        prompt = problem.messages[0]["content"]
        low, high = map(int, prompt.removeprefix("guess ").split("-"))
        assert 0 <= low <= int(problem.answer) <= high <= 99 and 8 <= high - low + 1 <= 16
        assert is_heldout(prompt) == (split == "heldout")


def test_hints_lead_to_the_number():
    environment = GuessNumber(0, numbers=16)
    asked = ({"role": "user", "content": "guess 20-35"},)
    problem = Problem("train/0", asked, "33", 0, None, {"low": 20, "high": 35})
    state = environment.reset(problem)
    said = [environment.step(guess, state) for guess in ("28", "27", "x", "34", "33")]
    assert [step.observation for step in said] == ["higher", "higher", "number?", "lower", ""]
    assert [step.reward for step in said] == [0.0, -0.1, -0.1, 0.0, 1.0]
    assert said[-1].done and said[-1].info == {"solved": 1.0, "wasted": 2.0}


def found_within(turns, **args):
    environment = GuessNumber(0, **args)
    problems = [environment.problem("warm_start", index) for index in range(400)]
    shown = [list(environment.demonstration(problem)) for problem in problems]
    assert all(turns[-1] == problem.answer for turns, problem in zip(shown, problems, strict=True))
    return sum(len(guesses) <= turns for guesses in shown) / 400


def test_demonstrations_find_the_number_sooner_or_later():
    """Four guesses in the middle find 99 per cent of the numbers; guesses anywhere 70, by simulation."""
    assert found_within(4, demonstrated_middles=1.0) == pytest.approx(0.99, abs=0.02)
    assert found_within(4, demonstrated_mistakes=0.0) == pytest.approx(0.70, abs=0.08)
