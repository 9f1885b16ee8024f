"""Rows of a dataset: a JSONL or Parquet file, or a Hugging Face dataset.

A row is a mapping of columns to values, with a place for error messages, such as "train.jsonl:17".
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljax.errors import CheckpointError, ConfigError
from rljax.hub import hub_name
from rljax.tasks.rewards.registry import require_package

Row = tuple[str, dict[str, Any]]

_JSON_LINES = (".jsonl", ".ndjson")


def read_file(path: str, key: str) -> Iterator[Row]:
    """Reads the rows of a file.

    Args:
      path: path of a .jsonl, .ndjson or .parquet file.
      key: config key of the path, for errors.

    Raises:
      ConfigError: a missing file, an unknown format, or a line that is not a JSON object; names the file and
        the line.
    """
    file = Path(path).expanduser()
    if file.suffix not in (*_JSON_LINES, ".parquet"):
        raise ConfigError(f"{key}: {path} should end in .jsonl, .ndjson or .parquet")
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    return _parquet(file, key) if file.suffix == ".parquet" else _json_lines(file)


def read_hub(name: str, subset: str | None, split: str, key: str) -> Iterator[Row]:
    """Reads the rows of a Hugging Face dataset, by its name on the hub, `org/name` or `org/name@revision`, or
    from a local directory of data files. Where the hub cannot be reached, the cached rows of the revision.
    """
    require_package(("datasets", "datasets"), key)
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    try:
        dataset, revision = hub_name(name) or (name, None)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        builder = datasets.load_dataset_builder(dataset, subset, revision=revision)
        if revision is not None and isinstance(builder, Cache):  # the newest cached rows, of any revision
            builder = Cache(
                dataset_name=builder.dataset_name,
                config_name=builder.config.name,
                version=str(builder.config.version),
                hash=_cached_commit(dataset, revision),
                repo_id=dataset,
            )
        builder.download_and_prepare()
        loaded = builder.as_dataset(split=split)
    except Exception as error:  # several libraries raise errors of many types
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{key}: cannot load {name!r}, split {split!r}: {reason}") from error
    shown = Path(name).name
    return ((f"{shown}/{split}:{number}", dict(row)) for number, row in enumerate(loaded))


def _cached_commit(dataset: str, revision: str) -> str:
    """Returns the commit that a revision was when the hub was called."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    refs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=dataset, repo_type="dataset"), "refs")
    return (refs / revision).read_text() if (refs / revision).is_file() else revision


def _json_lines(file: Path) -> Iterator[Row]:
    try:
        opened = file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    with opened as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file.name}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{file}:{number}: is not UTF-8 text (byte {error.start + 1})") from error
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file}:{number}: is not valid JSON: {error}") from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ConfigError(f"{file}:{number}: should be a JSON object, not a {kind}")
            yield place, row


def _parquet(file: Path, key: str) -> Iterator[Row]:
    require_package(("pyarrow", "datasets"), key)
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file}: is not a readable Parquet file: {' '.join(str(error).split())}"
        ) from error
    return ((f"{file.name}:{number}", row) for number, row in enumerate(rows, 1))
