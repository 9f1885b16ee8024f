"""Models of the Hugging Face hub by name, wherever a directory of one is expected: `org/name`, or
`org/name@revision` for a branch, a tag or a commit.

What exists here wins, and what is missing in a directory that exists here is no name of the hub: `runs/x` is
a mistyped path where there is `runs/`, and `runs/x@main` still a name. Otherwise the library
`huggingface_hub` fetches the files that are read of a model, with its cache, its tokens, its progress bars
and its switch HF_HUB_OFFLINE; it goes on where an interrupted download ended. A run keeps the commit in its
config, `org/name@<commit>`, so that neither a resume nor an evaluation takes other weights when the model
gets new ones.

A GGUF file is a model as well: `model.gguf`, or `package:NAME` for the one in an installed package. It is
imported once, into the directory rljax/gguf of the user's cache ($XDG_CACHE_HOME, else ~/.cache).
"""

import difflib
import functools
import hashlib
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from rljax.errors import CheckpointError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][^@\s]*))?", re.ASCII)
_PACKAGE = "package:"
_SMALL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
_WEIGHTS = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)


def hub_name(path: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Returns `org/name` and the revision, if one is given; None for what exists here or is no such name.

    Raises:
      CheckpointError: it is missing in a directory that exists here; names the path that is nearest.
    """
    match = None if os.path.exists(path) else _NAME.fullmatch(os.fspath(path))
    if match is None:
        return None
    parent, _, name = match[1].partition("/")
    if match[2] is None and os.path.isdir(parent):
        near = difflib.get_close_matches(name, [entry.name for entry in Path(parent).glob("*")], n=1)
        raise CheckpointError(
            f"{path}: does not exist; the nearest path is {'/'.join((parent, *near))} (for the hub's model of"
            f" this name give a revision: {path}@main)"
        )
    return match[1], match[2]


def local_directory(path: str | os.PathLike[str], weights: bool = True) -> Path:
    """Returns the directory that a path or a name of the hub means; fetches what is missing of the latter,
    and imports a GGUF file.

    Args:
      path: a directory, which need not exist, a GGUF file, the package of one, or a name of the hub.
      weights: whether the weights are needed, and not only configs and tokenizer.

    Raises:
      CheckpointError: the hub has no such model or revision, does not hand it out, or cannot be reached; the
        model has no safetensors; there is no such file or package, or its policy is not supported.
    """
    text = os.fspath(path)
    if text.startswith(_PACKAGE):
        return _imported(_file_of_package(text.removeprefix(_PACKAGE)))
    if text.endswith(".gguf"):
        return _imported(Path(text))
    name = hub_name(path)
    return Path(path) if name is None else _snapshot(*name, weights)


def _file_of_package(name: str) -> Path:
    """Returns the GGUF file of an installed package."""
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise CheckpointError(
            f"{_PACKAGE}{name}: the package is not installed (pip install --no-deps {name})"
        ) from error
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise CheckpointError(f"{_PACKAGE}{name}: the package has {len(found)} GGUF files, not one")
    return Path(str(found[0].locate()))


@functools.cache  # reading 100 MB for their digest takes 0.1 s
def _imported(file: Path) -> Path:
    """Returns the directory of a GGUF file's policy, named by the digest of the file."""
    try:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "blake2b").hexdigest()[:16]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = cache / "rljax" / "gguf" / f"{file.stem}-{digest}"
    if not directory.is_dir():
        # JAX takes seconds to import.
        from rljax.models.gguf_files import import_gguf

        try:
            import_gguf(file, directory)
        except OSError as error:
            if not directory.is_dir():  # otherwise another process was sooner
                raise CheckpointError(f"{directory}: cannot be written ({error.strerror})") from error
    return directory


@functools.cache  # a process sees one commit of a branch
def _snapshot(name: str, revision: str | None, weights: bool) -> Path:
    shown = name if revision is None else f"{name}@{revision}"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    except ImportError as error:
        raise CheckpointError(
            f"{shown}: there is no such directory; a model of the hub needs pip install huggingface_hub"
        ) from error

    class Bar(tqdm):  # for weights alone: the others are there at once
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | ({} if weights else {"disable": True}))

    files = [*_SMALL_FILES, *(_WEIGHTS if weights else ())]
    try:
        directory = snapshot_download(name, revision=revision, allow_patterns=files, tqdm_class=Bar)
    except Exception as error:  # several libraries raise errors of many types
        raise CheckpointError(f"{shown}: {_reason(error)}") from error
    if weights and not any(Path(directory).glob("*.safetensors")):
        raise CheckpointError(f"{shown}: has no model.safetensors; weights of other formats are not read")
    return Path(directory)


def _reason(error: Exception) -> str:
    """Returns in words why a model cannot be had."""
    from huggingface_hub import constants, errors

    hub, here = constants.ENDPOINT, "there is no such directory here"
    match error:
        case errors.GatedRepoError():
            return f"it is gated; accept its terms at {hub}, and log in (hf auth login)"
        case errors.RevisionNotFoundError():
            return f"there is no such revision at {hub}"
        case errors.RepositoryNotFoundError():
            return f"{here}, and no such model at {hub}, or it is private (hf auth login)"
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            return f"{here}, nor model in the cache, and HF_HUB_OFFLINE is set"
        case errors.LocalEntryNotFoundError():
            return f"{here}, nor model in the cache, and {hub} cannot be reached"
    return f"it cannot be fetched: {' '.join(str(error).split())[:300]}"


def pinned(path: str, recorded: str | None = None) -> str:
    """Returns a name of the hub with the commit in the place of its revision, and other paths as they are.

    Args:
      path: a directory or a name of the hub.
      recorded: what this gave for the run that goes on, which a name without a revision keeps.

    Raises:
      CheckpointError: as `local_directory`.
    """
    name = hub_name(path)
    if name is None:
        return path
    if name[1] is None and recorded is not None and recorded.startswith(f"{name[0]}@"):
        return recorded
    return f"{name[0]}@{local_directory(path, weights=False).name}"


def state() -> str:
    """Returns in words whether the hub answers, within seconds."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants, get_token

    cache = f"; the cache is {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        return f"not asked: HF_HUB_OFFLINE is set{cache}"
    try:
        with urllib.request.urlopen(f"{constants.ENDPOINT}/api/models?limit=1", timeout=3):
            pass
    except urllib.error.HTTPError as error:
        return f"{constants.ENDPOINT} answers with {error.code} {error.reason}{cache}"
    except OSError as error:
        why = getattr(error, "reason", error)
        return f"{constants.ENDPOINT} does not answer ({why}): only models of the cache can be named{cache}"
    return f"{constants.ENDPOINT} answers, {'with' if get_token() else 'without'} a token{cache}"
