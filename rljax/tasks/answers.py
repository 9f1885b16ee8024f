"""The answer that a response gives, as text: what maj@k votes on (Wang et al., arXiv 2203.11171)."""

import re

from rljax.tasks.base import Problem, Task
from rljax.tasks.rewards.extraction import answer_finder

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_PLACES = ("boxed", "marker", "number")


def extracted_answer(task: Task, problem: Problem, response_text: str) -> str | None:
    """The answer in a form in which equal answers are equal texts, None where there is none: by the task's
    own method of this name, else by `last_answer`.
    """
    own = getattr(task, "extracted_answer", None)
    return last_answer(response_text) if own is None else own(problem, response_text)


def last_answer(text: str) -> str | None:
    r"""What is in the last `\boxed{...}`, else behind the last `####`, else the last number.

    Spaces, dollar signs, thousands separators and a full stop at the end do not tell answers apart.
    """
    everywhere = (answer_finder(place)(text) for place in _PLACES)
    found = next((answer for answer in everywhere if answer is not None), None)
    if found is None:
        return None
    plain = "".join(found.replace("$", "").split()).removesuffix(".")
    if _NUMBER.fullmatch(plain):
        plain = plain.replace(",", "")
    return plain or None
