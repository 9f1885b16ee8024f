"""Adapters, against stand-ins with the signatures of the libraries that they adapt."""

import pytest

from rljax.environments.adapters.seeded import Gymnasium, OpenEnv
from rljax.environments.adapters.verifiers import Verifiers
from rljax.environments.episodes import Episodes
from rljax.errors import ConfigError
from rljax.importing import LoadError
from tests.environments import stand_ins

HERE = "tests.environments.stand_ins"


def play(environment, problem, turns):
    episodes = Episodes(environment)
    return [episodes.step("a", problem, turns[: n + 1], False) for n in range(len(turns))]


def rewards(steps):
    return [step["reward"] for step in steps]


def contents(steps):
    return [[message["content"] for message in step["messages"]] for step in steps]


def test_gymnasium():
    environment = Gymnasium(0, f"{HERE}:Walk", system="1 or 0", mistake="0 or 1!", mistake_reward=-0.5)
    problem = environment.problem("train", 0)
    assert problem == environment.problem("train", 0) != environment.problem("train", 1)
    place = problem.data["seed"] % 3
    assert [m["content"] for m in problem.messages] == ["1 or 0", f"at {place}"]
    turns = ["up", "7", *["1"] * (3 - place)]
    steps = play(environment, problem, turns)
    assert contents(steps)[:2] == [["0 or 1!"], ["0 or 1!"]]
    assert rewards(steps) == [-0.5, -0.5, *[0.0] * (2 - place), 1.0]
    assert [step["done"] for step in steps] == [False] * (len(steps) - 1) + [True]


def test_an_environment_that_forgets_its_seed_is_refused():
    environment = Gymnasium(0, stand_ins.Forgetful)
    with pytest.raises(ValueError, match="another observation for the same seed"):
        play(environment, environment.problem("train", 0), ["1"])


@pytest.mark.parametrize("name", ["EchoClient", "EchoServer"])
def test_openenv(name):
    environment = OpenEnv(0, f"{HERE}:{name}", {"times": 2}, action=f"{HERE}:Said", mistake="letters")
    problem = environment.problem("train", 0)
    assert problem.messages[0]["content"].startswith("say something")
    closed = stand_ins.EchoClient.closed, stand_ins.EchoServer.closed
    steps = play(environment, problem, ["ab", "1", "xyz"])
    assert (stand_ins.EchoClient.closed, stand_ins.EchoServer.closed) != closed  # resources are given back
    assert rewards(steps) == [2.0, 0.0, 3.0]
    assert contents(steps)[:2] == [["AB"], ["letters"]] and steps[2]["done"]


def test_observations_without_a_text_are_refused():
    environment = OpenEnv(0, stand_ins.EchoClient, observation="absent")
    with pytest.raises(TypeError, match=r"name the field that is one with task\.args\.observation"):
        environment.problem("train", 0)


@pytest.mark.parametrize("name", ["DoubleCheck", "DoubleCheckLater"])
def test_verifiers(name):
    environment = Verifiers(0, f"{HERE}:{name}", {"rows": 24})
    problem = environment.problem("train", 0)
    assert [m["role"] for m in problem.messages] == ["system", "user"]
    number = problem.data["info"]["n"]
    assert problem.messages[1]["content"] == f"{number}+1" and problem.answer == str(number + 1)
    steps = play(environment, problem, ["hm", f"sure, {number + 1}"])
    assert contents(steps)[0] == ["really (1)?"] and steps[1]["done"]
    assert rewards(steps) == [0.0, 1.0 + 0.5 * 0.5]
    assert steps[1]["info"] == {"found": 1.0, "brevity": 0.5}
    assert rewards(play(environment, problem, ["a", "b", "c"]))[2] == pytest.approx(0.5 / 3)
    cut = Episodes(environment).step("a", problem, ["hm"], True)
    assert cut["reward"] == 0.5 and not cut["done"]


def test_a_dataset_of_verifiers_is_split_and_ordered_by_epoch():
    environment = Verifiers(0, stand_ins.DoubleCheck(rows=40))
    train = [environment.problem("train", index).id for index in range(environment.size)]
    assert len(set(train)) == len(train) == environment.size < 40
    again = [environment.problem("train", environment.size + i).id for i in range(environment.size)]
    assert set(again) == set(train) and again != train
    held = {environment.problem("heldout", index).messages[1]["content"] for index in range(40)}
    assert held and held.isdisjoint(
        environment.problem("train", index).messages[1]["content"] for index in range(environment.size)
    )


@pytest.mark.parametrize(
    ("kind", "environment", "args", "says"),
    [
        (Gymnasium, f"{HERE}:Discrete", {}, "args.environment: .*Discrete has no method reset"),
        (Gymnasium, f"{HERE}:Absent", {}, "args.environment: .*has no Absent"),
        (OpenEnv, f"{HERE}:EchoClient", {"action": "x"}, "args.action: write it as module:name"),
        (Verifiers, f"{HERE}:Walk", {}, "args.environment: Walk has no method env_response"),
        (Verifiers, f"{HERE}:DoubleCheck", {"args": {"rows": 0}}, "its dataset has no rows"),
    ],
)
def test_a_mistake_names_the_argument(kind, environment, args, says):
    with pytest.raises((ConfigError, LoadError), match=says):
        kind(0, environment, **args)
