"""The configs that come with rljax, found from any directory.

In a checkout they are `configs/`; a wheel carries them as `rljax/configs/`.
"""

import difflib
import os
from pathlib import Path

from rljax.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_CHECKOUT = "configs"  # the folder's name there, and in paths that a packaged config holds


def packaged_folder() -> Path | None:
    """Returns the folder of the packaged configs; None where the installation has none."""
    candidates = (_PACKAGE / "configs", _PACKAGE.parent / _CHECKOUT)
    return next((folder for folder in candidates if (folder / "quickstart.yaml").is_file()), None)


def packaged_names() -> list[str]:
    """Returns what `--config` may name without a file: "quickstart" and its siblings, sorted."""
    folder = packaged_folder()
    return [] if folder is None else sorted(path.stem for path in folder.glob("*.yaml"))


def find_config(path: str | os.PathLike[str]) -> Path:
    """Returns the file of a config: itself if it exists, else the packaged one of this bare name.

    Args:
      path: a file, or the name of a packaged config, with or without ".yaml".

    Raises:
      ConfigError: neither; the line lists the packaged names, the nearest first.
    """
    file = Path(path)
    if file.exists() and not (file.is_dir() and file.name in packaged_names()):
        return file
    folder, name = packaged_folder(), file.name.removesuffix(".yaml")
    if folder is not None and file.parent == Path() and name in packaged_names():
        return folder / f"{name}.yaml"
    raise ConfigError(f"{path}: no such config file{_hint(name)}")


def find_policy(path: str) -> str:
    """Returns `policy.path`, or the packaged folder where that is meant: a published config.json, say.

    Args:
      path: a directory; one such as `configs/models/qwen3-8b` is looked for next to the packaged configs if
        it is not here.
    """
    folder, parts = packaged_folder(), Path(path).parts
    if folder is None or Path(path).exists() or parts[:1] != (_CHECKOUT,):
        return path
    packaged = folder.joinpath(*parts[1:])
    return str(packaged) if packaged.is_dir() else path


def _hint(name: str) -> str:
    names = packaged_names()
    if not names:
        return ""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"; {guess}Packaged, for --config from any directory: {', '.join(names)}"
