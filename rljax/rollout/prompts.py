"""Prompts of a task's problems in tokens, and what becomes of those that are too long."""

from collections.abc import Callable, Mapping

from rljax.errors import UserError
from rljax.models.tokenizer import Tokenizer
from rljax.tasks.base import Problem, Split, Task
from rljax.tasks.curriculum import Curriculum
from rljax.tasks.wrapper import finite_problems

_TRIED = 10_000  # positions in a row without a prompt that fits; a task of such prompts is a mistake


class Prompts:
    """Prompts of one task for one policy.

    Args:
      longest: `rollout.max_prompt_length`, the largest number of tokens in a prompt.
      leave_out: whether problems with a longer prompt are left out (`rollout.long_prompts: leave_out`);
        otherwise such a prompt is an error.
      curriculum: passes over training problems by their pass rates; None asks all of them.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        longest: int,
        leave_out: bool = False,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._longest, self._leave_out, self._curriculum = longest, leave_out, curriculum

    def tokens(self, problem: Problem) -> tuple[int, ...]:
        """Returns the token ids of a problem's prompt; raises a UserError if there are too many."""
        prompt = self._tokens(problem)
        if len(prompt) > self._longest:
            raise UserError(
                f"rollout.max_prompt_length: {self._longest}, but the prompt of problem {problem.id} has"
                f" {len(prompt)} tokens; raise it, or set rollout.long_prompts: leave_out"
            )
        return prompt

    def next_problems(self, split: Split, position: int, count: int) -> tuple[list[int], int]:
        """Returns the indices of the next problems that are asked, and the position behind them.

        Args:
          position: index of the first problem to consider.

        Passed over are problems that are too long, if these are left out, or that the curriculum does not
        ask.

        Raises:
          UserError: prompts that are too long are left out, and no other is left.
        """
        curriculum = self._curriculum if split == "train" else None
        if not self._leave_out and curriculum is None:
            return list(range(position, position + count)), position + count
        indices: list[int] = []
        too_long = 0
        while len(indices) < count:
            problem = self._task.problem(split, position)
            if not self._leave_out or self._fits(problem):
                too_long = 0
                if curriculum is None or curriculum.asks(problem, position):
                    indices.append(position)
            elif (too_long := too_long + 1) == _TRIED:
                raise UserError(
                    f"rollout.max_prompt_length: {self._longest}, and {_TRIED:,} {split} prompts in a row,"
                    f" the last that of problem {problem.id}, are longer; raise it"
                )
            position += 1
        return indices, position

    def fitting(self, problems: Mapping[int, Problem], say: Callable[[str], None]) -> dict[int, Problem]:
        """Returns the held-out problems, by index, that are asked; says how many are left out."""
        if not self._leave_out:
            return dict(problems)
        kept = {index: problem for index, problem in problems.items() if self._fits(problem)}
        if problems and not kept:
            raise UserError(
                f"rollout.max_prompt_length: {self._longest}, and all {len(problems):,} held-out prompts are"
                " longer; raise it"
            )
        if len(kept) < len(problems):
            say(
                f"{len(problems) - len(kept):,} of {len(problems):,} held-out prompts are left out: they have"
                f" more than {self._longest} tokens (rollout.max_prompt_length)"
            )
        return kept

    def check(self, say: Callable[[str], None]) -> None:
        """Checks the first prompt and, of a finite task, all of them, before anything compiles.

        Args:
          say: called with a line if prompts are left out.

        Raises:
          UserError: a prompt is too long and none may be left out, or all of them are too long; or the
            tokenizer has no chat template for them.
        """
        problems = finite_problems(self._task)
        lengths = [len(self._tokens(problem)) for problem in problems]
        too_long = sum(length > self._longest for length in lengths)
        if too_long:
            self._check_finite(problems, lengths, too_long, say)
        (first,), _ = self.next_problems("train", 0, 1)
        self.tokens(self._task.problem("train", first))

    def _check_finite(
        self, problems: list[Problem], lengths: list[int], too_long: int, say: Callable[[str], None]
    ) -> None:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        what = (
            f"rollout.max_prompt_length: {self._longest}, but {too_long:,} of {len(problems):,} prompts are"
            f" longer; that of problem {problems[longest].id} has {lengths[longest]:,} tokens"
        )
        if not self._leave_out:
            raise UserError(f"{what}. Raise it, or set rollout.long_prompts: leave_out")
        if too_long == len(problems):
            raise UserError(f"{what}. None is left: raise it")
        say(f"{what}. They are left out")

    def _tokens(self, problem: Problem) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_chat(problem.messages))

    def _fits(self, problem: Problem) -> bool:
        return len(self._tokens(problem)) <= self._longest
