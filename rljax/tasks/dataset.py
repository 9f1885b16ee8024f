"""Problems from a file or a Hugging Face dataset: `task.name: dataset`.

The order of the problems differs from epoch to epoch. It is a pure function of (seed, split, epoch), so the
position in the data is one integer here too. `task.rewards` judge the responses; a dataset has no reward.
"""

import functools
import hashlib
import json
import math
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
_LARGEST_WHOLE = 2.0**53  # beyond it a float is an approximation, and 1e+16 says so


class Dataset:
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      path: a .jsonl or .parquet file of problems; this or `hub`.
      heldout_path: a file of held-out problems. Without it, the hash of the prompt decides whether a problem
        of `path` is held out: one in eight is.
      hub: id of a dataset on the Hugging Face hub, or a local directory of data files.
      subset: subset of `hub`, if it has several.
      split: split of `hub` for training.
      heldout_split: split of `hub` for evaluation; without it, the hash of the prompt decides.
      prompt: column with the prompt: text, or a list of messages {role, content}. This and every other column
        may be a field within a column, by its path: reward_model.ground_truth.
      answer: column with the right answer; null where no reward needs it.
      answer_marker: marker in the answer's column; the answer is the text after it, as with "####" in GSM8K.
      difficulty: column with a whole number, alone or within text ("Level 3"); null makes all equally hard.
      difficulties: [lowest, highest]; other problems are left out.
      longest_prompt: most characters of a prompt; problems with a longer one are left out.
      solution: column with worked solutions, for a warm start.
      system: a system message before every prompt.
      template: text around a prompt; contains {prompt}.
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
        args = dict(locals())
        self.seed = seed
        _check(args)
        self._args = args
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
        problem_random(self.seed, split, index)  # raises an error for an unknown split or a negative index
        problems = self._problems[split]
        if not problems:
            raise ConfigError(
                "task.args: no problem is held out; give more problems, heldout_path, or"
                " evaluation.problems: 0"
            )
        epoch, place = divmod(index, len(problems))
        return problems[self._order(split, 0 if split == "heldout" else epoch)[place]]

    def reward(self, problem: Problem, response_text: str) -> dict[str, float]:
        """Raises an error: `task.rewards` judge the responses."""
        raise ConfigError("task.rewards: a dataset has no reward of its own; list at least one")

    def finite_problems(self) -> list[Problem]:
        """All problems, training ones first."""
        return [*self._problems["train"], *self._problems["heldout"]]

    def fingerprint(self) -> dict[str, str]:
        """Returns a digest of the rows of each file or dataset, by its name. With the arguments, the rows
        determine the problems.
        """
        return self._digests

    def _new_order(self, split: Split, epoch: int) -> list[int]:
        # Only the numbers of `random` itself are the same in every Python version.
        source = problem_random(self.seed, split, epoch)
        keys = [source.random() for _ in self._problems[split]]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _read(self, path: str | None, split: str | None, key: str) -> list[tuple[str, Problem]]:
        """Returns pairs of the prompt in the row, which decides the split, and the problem."""
        args = self._args
        rows = read_file(path, key) if path else read_hub(args["hub"], args["subset"], split, key)
        digest = hashlib.blake2b(digest_size=16)
        problems = list(self._problems_of(_digested(rows, digest)))
        self._digests[path or f"{args['hub']} ({split})"] = digest.hexdigest()
        if not problems:
            raise ConfigError(f"{key}: {path or args['hub']} has no problem")
        return problems

    def _problems_of(self, rows: Iterator[Row]) -> Iterator[tuple[str, Problem]]:
        lowest, highest = self._args["difficulties"] or (None, None)
        longest = self._args["longest_prompt"]
        for place, row in rows:
            try:
                problem = _problem(place, row, self._args)
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from error
            in_range = lowest is None or lowest <= problem.difficulty <= highest
            length = sum(len(message["content"]) for message in problem.messages)
            if in_range and (longest is None or length <= longest):
                yield str(_column(row, self._args["prompt"])), problem


def _digested(rows: Iterator[Row], digest: "hashlib._Hash") -> Iterator[Row]:
    for place, row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        yield place, row


def _problem(place: str, row: Mapping[str, Any], args: Mapping[str, Any]) -> Problem:
    messages = list(_messages(_column(row, args["prompt"])))
    if args["template"] is not None:
        last = messages[-1]
        messages[-1] = {**last, "content": args["template"].replace("{prompt}", last["content"])}
    if args["system"] is not None:
        messages.insert(0, {"role": "system", "content": args["system"]})
    difficulty = 0 if args["difficulty"] is None else _difficulty(row, args["difficulty"])
    solution = None if args["solution"] is None else _column(row, args["solution"])
    if solution is not None and not isinstance(solution, str):
        raise ValueError(f"{args['solution']!r} should be text, not a {type(solution).__name__}")
    return Problem(place, tuple(messages), _answer(row, args), difficulty, solution, row)


def _column(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column; with dots in its name, of a field within a column."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"there is no column {name!r}, only {', '.join(map(repr, row)) or 'an empty object'}"
            )
        value = value[part]
    if value is None:
        raise ValueError(f"{name!r} is null")
    return value


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


def _answer(row: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    if args["answer"] is None:
        return ""
    value = _column(row, args["answer"])
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"the answer should be text or a number, not a {type(value).__name__}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"the answer is {value}, which is no number")
        if value.is_integer() and abs(value) < _LARGEST_WHOLE:  # of a column in which some rows have none
            value = int(value)
    if args["answer_marker"] is None:
        return str(value)
    answer = after_marker(str(value), args["answer_marker"])
    if answer is None:
        raise ValueError(f"there is nothing after {args['answer_marker']!r} in {args['answer']!r}")
    return answer


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


def _check(args: Mapping[str, Any]) -> None:
    """Raises a ConfigError for invalid arguments. Columns are checked as rows are read."""
    for name in _TEXT_ARGS:
        if args[name] is not None and (not isinstance(args[name], str) or not args[name]):
            raise ConfigError(f"task.args.{name}: should be text that is not empty, not {args[name]!r}")
    if (args["path"] is None) == (args["hub"] is None):
        raise ConfigError("task.args.path: give the path of a file, or hub, the id of a dataset; one of them")
    for name in ("subset", "heldout_split"):
        if args["path"] is not None and args[name] is not None:
            raise ConfigError(f"task.args.{name}: belongs to task.args.hub, not to a file")
    if args["prompt"] is None:
        raise ConfigError("task.args.prompt: should be the name of a column")
    if args["template"] is not None and "{prompt}" not in args["template"]:
        raise ConfigError("task.args.template: should hold {prompt}, where the prompt goes")
    longest = args["longest_prompt"]
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(f"task.args.longest_prompt: should be a whole number above 0, not {longest!r}")
    bounds = args["difficulties"]
    if bounds is not None:
        whole = isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]
        if not whole or bounds[0] > bounds[1]:
            raise ConfigError(f"task.args.difficulties: should be [lowest, highest], not {bounds!r}")
        if args["difficulty"] is None:
            raise ConfigError("task.args.difficulties: needs task.args.difficulty, the column")
