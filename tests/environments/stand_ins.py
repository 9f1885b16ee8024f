"""Environments as a user may write them, well and badly, and stand-ins with other libraries' interfaces."""

import dataclasses
import time
from typing import Any

from rljax.environments.base import Step
from rljax.tasks.base import Problem


class Counting:
    """Counts down from the number that the problem asks for; a turn may say how to misbehave."""

    def __init__(self, seed: int, first: int = 3) -> None:
        self.seed, self.first, self.resets = seed, first, 0
        if first < 0:
            raise ValueError("first is below 0")

    def problem(self, split, index):
        content = f"count {self.first + index % 2}"
        return Problem(f"{split}/{index}", ({"role": "user", "content": content},), str(self.first), 0)

    def reset(self, problem):
        self.resets += 1
        return {"left": int(problem.messages[-1]["content"].split()[1]), "said": 0}

    def step(self, action, state):
        if action == "raise":
            raise RuntimeError("it broke")
        if action == "hang":
            time.sleep(60)
        if action == "die":
            import os

            os._exit(3)
        if action == "nothing":
            return None
        if action == "infinite":
            return Step("x", float("inf"))
        state["said"] += 1
        right = action == str(state["left"])
        state["left"] -= right
        done = state["left"] == 0
        return Step(f"{state['left']} left", 0.5 * right, done, {"said": state["said"], "done": float(done)})

    def cut_off(self, state):
        return Step(reward=-1.0, info={"cut": 1.0})

    def demonstration(self, problem):
        left = int(problem.messages[-1]["content"].split()[1])
        return [str(number) for number in range(left, 0, -1)]


class NoStep(Counting):
    """Lacks the method that makes an environment."""

    step = None


@dataclasses.dataclass
class StepResult:
    """As OpenEnv's `client_types.StepResult`."""

    observation: Any
    reward: float | None = None
    done: bool = False


@dataclasses.dataclass
class Echoed:
    """An observation of OpenEnv, a message with facts."""

    message: str
    reward: float | None = None
    done: bool = False


@dataclasses.dataclass
class Said:
    """An action of OpenEnv."""

    message: str

    def __post_init__(self):
        if not self.message.isalpha():
            raise ValueError("letters only")


class EchoClient:
    """An environment behind OpenEnv's client, without its network: echoes, three times."""

    closed = 0

    def __init__(self, times: int = 3) -> None:
        self.times, self.said = times, 0

    def reset(self) -> StepResult:
        return StepResult(Echoed("say something"))

    def step(self, action: Said) -> StepResult:
        self.said += 1
        reward = float(len(action.message))
        return StepResult(Echoed(action.message.upper()), reward, self.said == self.times)

    def close(self):
        type(self).closed += 1


class EchoServer(EchoClient):
    """The same inside OpenEnv's server: observations with reward and done, and a seed."""

    def reset(self, seed=None, episode_id=None, **kwargs) -> Echoed:
        return Echoed(f"say something, {seed % 10}")

    def step(self, action: Said, timeout_s=None, **kwargs) -> Echoed:
        result = super().step(action)
        return Echoed(result.observation.message, result.reward, result.done)


class Discrete:
    """Gymnasium's space of n whole numbers."""

    n = 2


class Walk:
    """A text environment with Gymnasium's interface: 1 goes on, 0 turns back, until 3."""

    action_space = Discrete()

    def reset(self, *, seed=None, options=None):
        self.place, self.steps = seed % 3, 0
        return f"at {self.place}", {}

    def step(self, action):
        assert action in (0, 1)
        self.place += 2 * action - 1
        self.steps += 1
        done = self.place == 3
        return f"at {self.place}", float(done), done, self.steps == 9, {"steps": self.steps}


class Forgetful(Walk):
    """Does not begin alike with the same seed."""

    count = 0

    def reset(self, *, seed=None, options=None):
        type(self).count += 1
        return super().reset(seed=type(self).count)


class Rubric:
    """As `verifiers.Rubric` holds its functions."""

    def __init__(self, funcs, weights=None):
        self.reward_funcs, self.reward_weights = funcs, weights or [1.0] * len(funcs)


def found(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"])


async def brevity(completion, state):
    return 1.0 / state["turn"]


class DoubleCheck:
    """With the interface of `verifiers.MultiTurnEnv` 0.1.3: asks again until the policy says "sure"."""

    system_prompt = "Answer."

    def __init__(self, rows=12, max_turns=3):
        self.dataset = [{"question": f"{n}+1", "answer": str(n + 1), "info": {"n": n}} for n in range(rows)]
        self.eval_dataset, self.max_turns = None, max_turns
        self.rubric = Rubric([found, brevity], [1.0, 0.5])

    def get_eval_dataset(self):
        return self.dataset  # as the library does where there is none

    async def setup_state(self, state, **kwargs):
        state["asked"] = 0
        return state

    async def is_completed(self, messages, state, **kwargs):
        assert messages[0]["role"] == "system"
        return "sure" in messages[-1]["content"] or state["turn"] >= self.max_turns

    async def env_response(self, messages, state, **kwargs):
        state["asked"] += 1
        return [{"role": "user", "content": f"really ({state['asked']})?"}], state


class DoubleCheckLater(DoubleCheck):
    """With the signatures of later versions: of the state alone, and messages alone."""

    async def is_completed(self, state, **kwargs):
        return "sure" in state["completion"][-1]["content"] or state["turn"] >= self.max_turns

    async def env_response(self, messages, state, **kwargs):
        return (await super().env_response(messages, state))[0]
