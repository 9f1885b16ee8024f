"""Extracts a response's answer as text, the vote of maj@k (Wang et al., arXiv 2203.11171)."""

from rljax.tasks.base import Problem, Task
from rljax.tasks.rewards.extraction import answer_finder
from rljax.tasks.rewards.spelling import plain, ungrouped

_PLACES = ("boxed", "marker", "number")


def extracted_answer(task: Task, problem: Problem, response_text: str) -> str | None:
    """Returns the answer in a normal form (equal answers are equal texts), None where there is none. A task
    with a method of this name decides; otherwise `last_answer` does.
    """
    extract = getattr(task, "extracted_answer", None)
    return last_answer(response_text) if extract is None else extract(problem, response_text)


def last_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, else the text after the last `####`, else the last
    number; None where there is none.

    Answers that differ only in spaces, dollar signs, the spelling of numbers (`spelling.plain`), thousands
    separators or a final full stop are equal.
    """
    candidates = (answer_finder(place)(text) for place in _PLACES)
    answer = next((candidate for candidate in candidates if candidate is not None), None)
    if answer is None:
        return None
    bare = plain(answer.replace("\\$", "").replace("$", ""))
    return ungrouped("".join(bare.split()).removesuffix(".")) or None
