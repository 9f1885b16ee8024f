"""Problems from a file or a Hugging Face dataset: `task.name: dataset`.

Every epoch has an order of its own, a pure function of (seed, split, epoch), so the position in the data is
one integer here too. Responses are judged by `task.rewards`; a dataset has no reward of its own.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rljax.errors import ConfigError
from rljax.tasks.base import Problem, Split, is_heldout, problem_random
from rljax.tasks.rewards.extraction import after_marker
from rljax.tasks.rows import Row, read_file, read_hub

_TEXT_ARGS = (
    "path", "heldout_path", "hub", "subset", "split", "heldout_split", "prompt", "answer", "answer_marker",
    "difficulty", "solution", "system", "template",
)  # fmt: skip
_ROLES = ("system", "user", "assistant")
_NUMBER = re.compile(r"[0-9]+")


class Dataset:
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      seed: the run seed.
      path: a .jsonl or .parquet file of problems; this or `hub`.
      heldout_path: one of held-out problems. Without it, a hash of its prompt decides whether a problem of
        `path` is held out: one in eight is.
      hub: id of a dataset on the Hugging Face hub, or a local directory of data files.
      subset: subset of `hub`, if it has several.
      split: split of `hub` for training.
      heldout_split: split of `hub` for evaluation; without it, prompts are hashed.
      prompt: column with the prompt: text, or a list of messages {role, content}.
      answer: column with the right answer, or null where rewards need none.
      answer_marker: the answer is what follows this in its column, such as "####" in GSM8K.
      difficulty: column with a whole number, alone or within text ("Level 3"); null makes all equally hard.
      difficulties: [lowest, highest], to keep only these problems.
      longest_prompt: characters of a prompt; problems with a longer one are left out.
      solution: column with worked solutions, for a warm start.
      system: a system message before every prompt.
      template: text around a prompt, with {prompt} in it.
    """

    has_reward = False

    def __init__(
        self,
        seed: int,
        path: str | None = None,
        heldout_path: str | None = None,
        hub: str | None = None,
        subset: str | None = None,
        split: str = "train",
        heldout_split: str | None = None,
        prompt: str = "prompt",
        answer: str | None = "answer",
        answer_marker: str | None = None,
        difficulty: str | None = None,
        difficulties: list[int] | None = None,
        longest_prompt: int | None = None,
        solution: str | None = None,
        system: str | None = None,
        template: str | None = None,
    ) -> None:
        given = dict(locals())
        self.seed = seed
        _check(given)
        self._given = given
        self._digests: dict[str, str] = {}
        source = path or hub
        train = self._read(path, split, "task.args.path" if path else "task.args.hub")
        if heldout_path or heldout_split:
            key = "task.args.heldout_path" if heldout_path else "task.args.heldout_split"
            heldout = self._read(heldout_path, heldout_split, key)
            asked = {prompt for prompt, _ in heldout}
            train = [row for row in train if row[0] not in asked]
        else:
            heldout = [row for row in train if is_heldout(row[0])]
            train = [row for row in train if not is_heldout(row[0])]
        if not train:
            raise ConfigError(f"task.args: {source} has no problem for training (held-out ones are left out)")
        train, heldout = ([problem for _, problem in rows] for rows in (train, heldout))
        self._problems = {"train": train, "heldout": heldout, "warm_start": train}
        self._order = functools.lru_cache(maxsize=8)(self._new_order)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`. Held-out problems keep one order."""
        problem_random(self.seed, split, index)  # refuses what is no split or index
        problems = self._problems[split]
        if not problems:
            raise ConfigError(
                "task.args: no problem is held out; give more problems, heldout_path, or"
                " evaluation.problems: 0"
            )
        epoch, place = divmod(index, len(problems))
        return problems[self._order(split, 0 if split == "heldout" else epoch)[place]]

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Not here: `task.rewards` judges."""
        raise ConfigError("task.rewards: a dataset has no reward of its own; list at least one")

    def finite_problems(self) -> list[Problem]:
        """All problems, training ones first."""
        return [*self._problems["train"], *self._problems["heldout"]]

    def fingerprint(self) -> dict[str, str]:
        """A digest of the rows of each file or dataset, by its name: what the problems follow from, beside
        the arguments.
        """
        return self._digests

    def _new_order(self, split: Split, epoch: int) -> list[int]:
        # Only the numbers of `random` itself are the same in every Python version.
        source = problem_random(self.seed, split, epoch)
        keys = [source.random() for _ in self._problems[split]]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _read(self, path: str | None, split: str | None, key: str) -> list[tuple[str, Problem]]:
        """Problems, each after its prompt as the row has it, which decides its split."""
        given = self._given
        rows = read_file(path, key) if path else read_hub(given["hub"], given["subset"], split, key)
        digest = hashlib.blake2b(digest_size=16)
        problems = list(self._problems_of(_digested(rows, digest)))
        self._digests[path or f"{given['hub']} ({split})"] = digest.hexdigest()
        if not problems:
            raise ConfigError(f"{key}: {path or given['hub']} has no problem")
        return problems

    def _problems_of(self, rows: Iterator[Row]) -> Iterator[tuple[str, Problem]]:
        lowest, highest = self._given["difficulties"] or (None, None)
        longest = self._given["longest_prompt"]
        for place, row in rows:
            try:
                problem = _problem(place, row, self._given)
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from error
            in_range = lowest is None or lowest <= problem.difficulty <= highest
            length = sum(len(message["content"]) for message in problem.messages)
            if in_range and (longest is None or length <= longest):
                yield str(row[self._given["prompt"]]), problem


def _digested(rows: Iterator[Row], digest: "hashlib._Hash") -> Iterator[Row]:
    for place, row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        yield place, row


def _problem(place: str, row: Mapping[str, Any], given: Mapping[str, Any]) -> Problem:
    messages = list(_messages(_column(row, given["prompt"])))
    if given["template"] is not None:
        last = messages[-1]
        messages[-1] = {**last, "content": given["template"].replace("{prompt}", last["content"])}
    if given["system"] is not None:
        messages.insert(0, {"role": "system", "content": given["system"]})
    difficulty = 0 if given["difficulty"] is None else _difficulty(row, given["difficulty"])
    solution = None if given["solution"] is None else _column(row, given["solution"])
    if solution is not None and not isinstance(solution, str):
        raise ValueError(f"{given['solution']!r} should be text, not a {type(solution).__name__}")
    return Problem(place, tuple(messages), _answer(row, given), difficulty, solution, row)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(
            f"there is no column {name!r}, only {', '.join(map(repr, row)) or 'an empty object'}"
        )
    if row[name] is None:
        raise ValueError(f"{name!r} is null")
    return row[name]


def _messages(prompt: Any) -> Iterator[dict[str, str]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        yield {"role": "user", "content": prompt}
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt should be text or a list of messages, not {str(prompt)[:60]!r}")
    for message in prompt:
        match message:
            case {"role": str(role), "content": str(content)} if role in _ROLES:
                yield {"role": role, "content": content}
            case _:
                raise ValueError(
                    f"a message should have a role ({', '.join(_ROLES)}) and content, not"
                    f" {str(message)[:60]!r}"
                )
    if prompt[-1]["role"] != "user":
        raise ValueError(f"the last message should be the user's, not the {prompt[-1]['role']}'s")


def _answer(row: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if given["answer"] is None:
        return ""
    value = _column(row, given["answer"])
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"the answer should be text or a number, not a {type(value).__name__}")
    if given["answer_marker"] is None:
        return str(value)
    found = after_marker(str(value), given["answer_marker"])
    if found is None:
        raise ValueError(f"there is nothing after {given['answer_marker']!r} in {given['answer']!r}")
    return found


def _difficulty(row: Mapping[str, Any], name: str) -> int:
    value = _column(row, name)
    numbers = _NUMBER.findall(value) if isinstance(value, str) else []
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if len(numbers) != 1:
        raise ValueError(f"the difficulty should be one whole number, not {str(value)[:60]!r}")
    return int(numbers[0])


def _check(given: Mapping[str, Any]) -> None:
    """A ConfigError about arguments that cannot be; Parquet and hub columns are checked as rows are read."""
    for name in _TEXT_ARGS:
        if given[name] is not None and (not isinstance(given[name], str) or not given[name]):
            raise ConfigError(f"task.args.{name}: should be text that is not empty, not {given[name]!r}")
    if (given["path"] is None) == (given["hub"] is None):
        raise ConfigError("task.args.path: give the path of a file, or hub, the id of a dataset; one of them")
    for name in ("subset", "heldout_split"):
        if given["path"] is not None and given[name] is not None:
            raise ConfigError(f"task.args.{name}: belongs to task.args.hub, not to a file")
    if given["prompt"] is None:
        raise ConfigError("task.args.prompt: should be the name of a column")
    if given["template"] is not None and "{prompt}" not in given["template"]:
        raise ConfigError("task.args.template: should hold {prompt}, where the prompt goes")
    longest = given["longest_prompt"]
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(f"task.args.longest_prompt: should be a whole number above 0, not {longest!r}")
    bounds = given["difficulties"]
    if bounds is not None:
        whole = isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]
        if not whole or bounds[0] > bounds[1]:
            raise ConfigError(f"task.args.difficulties: should be [lowest, highest], not {bounds!r}")
        if given["difficulty"] is None:
            raise ConfigError("task.args.difficulties: needs task.args.difficulty, the column")
