"""The protocol of tasks: numbered problems, and a reward that a program can check (RL with verifiable
rewards; DeepSeek-R1, 2025).

A task has no state. The problem at a position is a pure function of (seed, split, index), so a position in
the data is one integer: a resumed run continues with the problem it stopped at, and any process can make any
problem itself.
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

Rewards = Mapping[str, float | None]
"""The reward of a response, "reward", and its parts by name. None is what declined to judge it."""

Split = Literal["train", "heldout", "warm_start"]
SPLITS: tuple[str, ...] = get_args(Split)

HELDOUT_ONE_IN = 8
"""One of this many prompts belongs to the held-out split; no other split ever shows it."""


@dataclass(frozen=True)
class Problem:
    """One prompt, with the facts that checking a response takes.

    Attributes:
      id: name of the problem, unique within its task and seed, e.g. "heldout/17".
      messages: the conversation so far, in the form of chat templates: mappings with "role" and "content".
      answer: the right answer, as text.
      difficulty: a small integer that grows with the work a solution takes; metrics may be grouped by it.
      solution: a worked solution, the text of the assistant's turn; None where the task has none. In the
        `warm_start` split it is a demonstration and may contain mistakes; elsewhere it is right.
      data: other facts about the problem, such as the tests of a programming problem; JSON values.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    answer: str
    difficulty: int
    solution: str | None = None
    data: Mapping[str, Any] | None = None


@runtime_checkable
class Task(Protocol):
    """A source of problems and the judge of their responses.

    A task may also have a method `extracted_answer(problem, response_text) -> str | None`, which returns the
    response's answer in a normal form (equal answers are equal texts): the votes of maj@k. Without this
    method, `rljax.tasks.answers.last_answer` extracts the answer.

    A task that reads data has a method `fingerprint() -> dict[str, str]`, which returns a digest of each
    source by its name: a run refuses to resume with other data.
    """

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split, the same one at every call. Any index from 0 on is valid."""
        ...

    def reward(self, problem: Problem, response_text: str) -> Rewards:
        """Scores a response.

        Args:
          response_text: text of the response, without special tokens. It is untrusted: implementations never
            execute or evaluate it, and take at most linear time in its length.

        Returns:
          "reward", the number that training maximises, and its parts under other names. Where it is None the
          task declines: the response is left out of its group's statistics, and nothing is learned from it.
        """
        ...


def problem_random(seed: int, split: Split, index: int) -> random.Random:
    """Returns the random source of one problem, independent of every other problem's.

    Uses Python's generator because `random.Random.random` guarantees the same numbers in every later version,
    unlike NumPy's distributions: an upgrade must not change the data of a resumed run.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if index < 0:
        raise ValueError(f"a problem's index must be 0 or more, not {index}")
    digest = hashlib.blake2b(f"{seed}/{split}/{index}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def is_heldout(prompt: str) -> bool:
    """Returns whether a prompt belongs to the held-out split.

    The text of the prompt decides, so the splits are disjoint by construction, over all indices and seeds.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0
