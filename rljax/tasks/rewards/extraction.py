"""Finds the answer in a response, in time linear in its length."""

import re
from collections.abc import Callable

# No part can fail after its beginning has matched, so a search takes linear time on any text.
# A minus right after a digit is no sign ("5-10"), and a full stop after a word or in "..." begins no number.
_NUMBER = re.compile(
    r"(?:(?<![0-9])-)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?%?"
)
_BOXED = "\\boxed{"
_TAG = ("<answer>", "</answer>")

PLACES = ("response", "line", "number", "boxed", "tag", "marker")
"""Values of `answer_in`; see `answer_finder`."""


def answer_finder(answer_in: str, marker: str = "####") -> Callable[[str], str | None]:
    r"""Returns a function that finds the answer in a response, and returns None where there is none.

    Args:
      answer_in: "response", the whole response; "line", its last line that is not empty; "number", its last
        number; "boxed", the content of its last `\boxed{...}`; "tag", the content of its last
        `<answer>...</answer>`; "marker", the text after the last `marker`, to the end of the line.
      marker: marker of the place "marker", e.g. GSM8K's "####".

    Raises:
      ValueError: an unknown place, or an empty marker.
    """
    if answer_in not in PLACES:
        raise ValueError(f"args.answer_in: should be one of {', '.join(PLACES)}, not {answer_in!r}")
    if not isinstance(marker, str) or not marker:
        raise ValueError(f"args.marker: should be text that is not empty, not {marker!r}")
    if answer_in == "marker":
        return lambda text: after_marker(text, marker)
    return {
        "response": lambda text: text.strip() or None,
        "line": lambda text: next(
            (line.strip() for line in reversed(text.splitlines()) if line.strip()), None
        ),
        "number": lambda text: next(iter(_NUMBER.findall(text)[-1:]), None),
        "boxed": _boxed,
        "tag": _tagged,
    }[answer_in]


def after_marker(text: str, marker: str) -> str | None:
    """Returns the text after the last marker, to the end of its line; None if it is empty or missing."""
    _, separator, tail = text.rpartition(marker)
    return tail.partition("\n")[0].strip() or None if separator else None


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end].strip()
    return None  # the response was cut off inside the box


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
