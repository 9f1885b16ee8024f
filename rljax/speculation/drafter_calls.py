"""Calls of drafters: whatever goes wrong in one is a line that names the drafter and the method."""

from collections.abc import Callable
from typing import Any

from drafters.validation import ProtocolError
from rljax.errors import DrafterError, UserError

_ERROR_LENGTH = 300  # characters of a drafter's exception that its message shows


def call(name: str, drafter: Any, method: str, *arguments: Any) -> Any:
    """Calls a method of a drafter, or of what it hands out. Whatever it raises becomes a DrafterError."""
    try:
        return getattr(drafter, method)(*arguments)
    except UserError:
        raise
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error
    except Exception as error:
        said = " ".join(repr(error).split())[:_ERROR_LENGTH]
        raise DrafterError(f"speculation.drafter {name}: {method} raised {said}") from error


def call_checked(name: str, drafter: Any, method: str, check: Callable[[Any], Any]) -> Any:
    """Like `call`, and returns check(answer); a ProtocolError of the check becomes a DrafterError, too."""
    answer = call(name, drafter, method)
    try:
        return check(answer)
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error
