"""One spelling of numbers for the many that models write: signs, digits, separators of thousands, percent."""

import re
from fractions import Fraction

_LONGEST_NUMBER = 60  # characters; converting n digits takes time quadratic in n
_THIN = "\u2009"  # stands for every space that is written between groups of digits
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),  # minus, hyphens, dashes
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\u00a0\u202f", _THIN),
        **dict.fromkeys("\u2018\u2019\uff07", "'"),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **dict(zip("\uff0b\uff0c\uff0e\uff05\uff04", "+,.%$", strict=True)),
    }
)
_LATEX = {"\\!": "", "{,}": ",", "\\,": _THIN}
_IN_LATEX = re.compile(r"\\[!,]|\{,\}")
# A character that can only separate thousands there: three digits follow, and no fourth.
_SEPARATOR = re.compile(rf"(?<=[0-9])[{_THIN}'](?=[0-9]{{3}}(?![0-9]))")
_AFTER_EQUALS = re.compile(r"(?<==)\s*-\s+(?=[0-9.])")
_PERCENT = re.compile(r"(?<=[0-9]) (?=%)|(?<=[0-9]) ?per ?cent\b", re.IGNORECASE)
_CURRENCY = re.compile(r"(?<=-)\\?[$€£¥](?=[.0-9])|\\?\$(?= ?\\?%)")

# No part can fail after its beginning has matched, so a search takes linear time on any text.
# A minus right after a digit is no sign ("5-10"), and a full stop after a word or in "..." begins no number.
_NUMBER = re.compile(
    r"((?:(?<![0-9])-)?)([0-9][0-9,]*|(?<![\w.])(?=\.[0-9]))"
    r"((?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?%?)"
)
_WHOLE = re.compile(r"[+-]?[0-9][0-9,]*(?=[.eE/]|$)")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}")  # 1,234,567, and 12,34,567 in India
_SMALL_EXPONENT = re.compile(r"[^eE]*(?:[eE][+-]?[0-9]{1,3})?")  # 1e999999999 would fill the memory


def plain(text: str) -> str:
    r"""Returns a text with the signs, digits and separators of ASCII.

    Minus signs, hyphens and en dashes become "-", full-width digits and signs those of ASCII, fraction
    slashes "/". An apostrophe or a thin or unbreakable space between digits becomes a comma where exactly
    three digits follow; other such spaces become plain ones. LaTeX's `\!`, `\,` and `{,}` count as what they
    show.
    """
    text = _IN_LATEX.sub(lambda match: _LATEX[match[0]], text.translate(_CHARACTERS))
    return _SEPARATOR.sub(",", text).replace(_THIN, " ")


def last_number(text: str) -> str | None:
    """Returns the last number in a text, as `number` reads it; None where there is none.

    A currency between sign and number and a unit after it are left out, "- 5" is negative right after "=",
    and "1,2" is a list, whose last number is 2.
    """
    found = _NUMBER.findall(_readable(text))
    if not found:
        return None
    sign, whole, rest = found[-1]
    whole = whole.strip(",")
    if "," in whole and not _GROUPED.fullmatch(whole):
        sign, _, whole = "", *whole.rpartition(",")[1:]
    return sign + whole + rest


def number(text: str) -> Fraction | None:
    """Parses a number exactly; returns None for other text, such as a number with a unit.

    "50%", "50 %" and "50 percent" are 1/2. Commas separate thousands and nothing else.
    """
    text = _readable(text).replace("\\$", "$").strip().removesuffix(".").strip(" $€£¥")
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    text = ungrouped(text)
    if len(text) > _LONGEST_NUMBER or not text.isascii() or not _SMALL_EXPONENT.fullmatch(text):
        return None
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def ungrouped(text: str) -> str:
    """Returns a number without the commas between its groups of digits; another text as it is."""
    match = _WHOLE.match(text)
    grouped = match is not None and _GROUPED.fullmatch(match[0].lstrip("+-"))
    return match[0].replace(",", "") + text[match.end() :] if grouped else text


def _readable(text: str) -> str:
    text = _CURRENCY.sub("", plain(text).replace("\\%", "%"))
    return _PERCENT.sub(lambda match: "%" if match[0].strip() else "", _AFTER_EQUALS.sub(" -", text))
