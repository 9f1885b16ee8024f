"""Calls of drafters: whatever goes wrong in one is a line that names the drafter and the method."""

import contextlib
from collections.abc import Iterator

from drafters.validation import ProtocolError
from rljax.errors import DrafterError, UserError

_ERROR_LENGTH = 300  # characters of a drafter's exception that its message shows


@contextlib.contextmanager
def drafter_call(name: str, method: str) -> Iterator[None]:
    """Context that calls a method of a drafter, or of what it hands out, and may check what that returned:
    whatever is raised becomes a DrafterError.
    """
    try:
        yield
    except UserError:
        raise
    except ProtocolError as error:
        raise DrafterError(f"speculation.drafter {name}: {method} returned {error}") from error
    except Exception as error:
        said = " ".join(repr(error).split())[:_ERROR_LENGTH]
        raise DrafterError(f"speculation.drafter {name}: {method} raised {said}") from error
