"""The reward of the comparison, for programs that have no rljax: they find this file beside them."""

import re
from collections.abc import Sequence


def rewards(texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Returns 1 for every text whose last number is the answer, else 0."""
    return [_is_right(text, answer) for text, answer in zip(texts, answers, strict=True)]


def _is_right(text: str, answer: str) -> float:
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and answer.isdigit() and int(numbers[-1]) == int(answer))
