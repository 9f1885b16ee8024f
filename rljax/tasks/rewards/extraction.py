"""Finds the answer in a response, in time linear in its length."""

import re
from collections.abc import Callable

from rljax.tasks.rewards.spelling import last_number

_BOXED = "\\boxed{"
_THOUGHTS_END = re.compile(r"</think(?:ing)?>")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[,;!]|\\q?quad|\\text\{|\}|and|or)*")  # of one answer
_MOST_BETWEEN = 40  # characters
_TAG = ("<answer>", "</answer>")

PLACES = ("response", "line", "number", "boxed", "tag", "marker")
"""Values of `answer_in`; see `answer_finder`."""


def answer_finder(answer_in: str, marker: str = "####") -> Callable[[str], str | None]:
    r"""Returns a function that finds the answer in a response, and returns None where there is none. Except
    for "response", it looks after the thoughts (`after_thoughts`).

    Args:
      answer_in: "response", the whole response; "line", its last line that is not empty; "number", its last
        number (`spelling.last_number`); "boxed", the content of its last `\boxed{...}`; "tag", the content
        of its last `<answer>...</answer>`; "marker", the text after the last `marker`, to the end of the
        line.
      marker: marker of the place "marker", e.g. GSM8K's "####".

    Raises:
      ValueError: an unknown place, or an empty marker.
    """
    if answer_in not in PLACES:
        raise ValueError(f"args.answer_in: should be one of {', '.join(PLACES)}, not {answer_in!r}")
    if not isinstance(marker, str) or not marker:
        raise ValueError(f"args.marker: should be text that is not empty, not {marker!r}")
    if answer_in == "response":
        return lambda text: text.strip() or None
    find = {
        "line": lambda text: next(
            (line.strip() for line in reversed(text.splitlines()) if line.strip()), None
        ),
        "number": last_number,
        "boxed": _boxed,
        "tag": _tagged,
        "marker": lambda text: after_marker(text, marker),
    }[answer_in]
    return lambda text: find(after_thoughts(text))


def after_thoughts(text: str) -> str:
    """Returns the text after the last `</think>` or `</thinking>`; all of it without one. What a policy only
    thinks of is no answer.
    """
    end = 0
    for match in _THOUGHTS_END.finditer(text):
        end = match.end()
    return text[end:]


def last_formula(text: str) -> str:
    r"""Returns the part of a response in which its final formula stands.

    1. Only the text after the thoughts counts (`after_thoughts`).
    2. Of this the last `\boxed{...}`, with those before it that only commas, "and" or "or" separate from it,
       such as the two roots of an equation.
    3. Without a box, all of it.
    """
    text = after_thoughts(text)
    start = text.rfind(_BOXED)
    if start < 0:
        return text
    end = _closing(text, start, len(text))
    if end is None:  # the response was cut off inside the box
        return text[start:]
    boxes = [text[start:end]]
    while (before := text.rfind(_BOXED, 0, start)) >= 0:
        end = _closing(text, before, start)
        if end is None or start - end > _MOST_BETWEEN or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        boxes.insert(0, text[before:end])
        start = before
    return ", ".join(boxes)


def after_marker(text: str, marker: str) -> str | None:
    """Returns the text after the last marker, to the end of its line; None if it is empty or missing."""
    _, separator, tail = text.rpartition(marker)
    return tail.partition("\n")[0].strip() or None if separator else None


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    end = None if start < 0 else _closing(text, start, len(text))
    return None if end is None else text[start + len(_BOXED) : end - 1].strip()


def _closing(text: str, start: int, stop: int) -> int | None:
    """Returns the end of the box that begins at `start`; None where it is not before `stop`."""
    depth = 0
    for end in range(start, stop):
        depth += (text[end] == "{") - (text[end] == "}")
        if text[end] == "}" and depth == 0:
            return end + 1
    return None


def _tagged(text: str) -> str | None:
    head, closed, _ = text.rpartition(_TAG[1])
    _, opened, answer = head.rpartition(_TAG[0])
    return answer.strip() if closed and opened else None


def last_code_block(text: str) -> str:
    """Returns the contents of the last fenced block; the whole response without one."""
    lines, blocks, inside = text.splitlines(), [], None
    for line in lines:
        if not line.lstrip().startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside = []
        else:
            blocks.append(inside)
            inside = None
    return text if not blocks else "\n".join(blocks[-1]) + "\n"
