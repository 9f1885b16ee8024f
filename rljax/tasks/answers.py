"""The answer that a response gives, as text: what maj@k votes on (Wang et al., arXiv 2203.11171)."""

import re

from rljax.tasks.base import Problem, Task

# Nothing in it can fail after it has begun, so a search takes linear time on any text.
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_BOXED = "\\boxed{"
_MARKER = "####"  # GSM8K's


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
    found = _last_boxed(text)
    if found is None and _MARKER in text:
        found = text.rpartition(_MARKER)[2].partition("\n")[0]
    if found is None:
        found = next(iter(_NUMBER.findall(text)[-1:]), None)
    if found is None:
        return None
    plain = "".join(found.replace("$", "").split()).removesuffix(".")
    if _NUMBER.fullmatch(plain):
        plain = plain.replace(",", "")
    return plain or None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None  # cut off before its end
