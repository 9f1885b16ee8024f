"""A run's policy as a Hugging Face directory, and its EAGLE head as a draft model of serving engines."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from drafters.arguments import checked
from drafters.eagle.checkpoint import ServingEngine, save_head
from drafters.eagle.drafter import EagleArguments, EagleDrafter
from rljax.errors import CheckpointError
from rljax.models.huggingface import save_model
from rljax.models.transformer import Params
from rljax.training.model_card import model_card
from rljax.training.saved_policy import SavedPolicy

_HEAD = "eagle/train.params."  # of the drafters' state in a checkpoint


def check_destination(destination: str | os.PathLike[str], force: bool) -> Path:
    """The destination, if an export may go there.

    Raises:
      CheckpointError: something is there already, and `force` is False; or it is no model directory, which
        is not replaced by force either.
    """
    path = Path(destination).resolve()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return path
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} exists and is not a model directory; choose another one")
    if not force:
        raise CheckpointError(
            f"{path} holds a model already; choose another directory, or replace it: --force"
        )
    return path


def export_policy(
    saved: SavedPolicy, destination: str | os.PathLike[str], dtype: str = "float32", force: bool = False
) -> Path:
    """Writes a directory that `transformers` loads: weights, configs, tokenizer with its chat template, and a
    model card. It is written beside the destination and renamed when it is whole.

    Args:
      saved: a policy of a run.
      destination: see `check_destination`.
      dtype: of the weights: "float32", "bfloat16" or "float16".
      force: replace a model that is there.

    Returns:
      The directory.
    """
    if saved.experiment is None:
        raise CheckpointError(f"{saved.path} is a Hugging Face directory already; give a run directory")
    path, policy = check_destination(destination, force), saved.policy
    with _replacing(path) as partial:
        save_model(partial, policy.config, policy.params, dtype, tokenizer_source=policy.tokenizer_directory)
        (partial / "README.md").write_text(model_card(saved, dtype, path.name), encoding="utf-8")
    return path


def export_head(
    saved: SavedPolicy,
    destination: str | os.PathLike[str],
    dtype: str = "float32",
    engine: ServingEngine = "sglang",
    force: bool = False,
) -> Path:
    """Writes the EAGLE head that was trained beside the policy; arguments as for `export_policy`.

    Args:
      engine: whose layout (`drafters/eagle/checkpoint.py`).

    Raises:
      CheckpointError: the run has no such head.
    """
    state = saved.drafter_state()
    tensors = {name.removeprefix(_HEAD): array for name, array in state.items() if name.startswith(_HEAD)}
    if not tensors:
        raise CheckpointError(f"{saved.path} has no EAGLE head at this step{_drafters_of(saved)}")
    speculation = saved.experiment.speculation
    own = speculation.args if speculation.drafter == "eagle" else speculation.others.get("eagle", {})
    drafter = EagleDrafter(checked("speculation.args", "eagle", EagleArguments, own | {"save_dir": None}))
    drafter.reads(saved.policy.config, saved.policy.tokenizer)
    path = check_destination(destination, force)
    with _replacing(path) as partial:
        save_head(partial, drafter.config, _nested(tensors), dtype, engine)
    return path


def _drafters_of(saved: SavedPolicy) -> str:
    names = [] if saved.experiment is None else saved.experiment.speculation.drafters
    return f"; its drafters: {', '.join(names)}" if names else ", as it was trained without a drafter"


def _nested(tensors: dict[str, np.ndarray]) -> Params:
    """From names such as `layer.q` to the params pytree."""
    params: dict[str, Any] = {}
    for name, array in tensors.items():
        *parents, last = name.split(".")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return params


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Around the making of a directory: gives a place beside it, and renames that when it is whole. What was
    there before goes only then; after an error everything is as it was.
    """
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.export-", dir=path.parent))
        yield beside / "new"
        if path.exists():
            path.rename(beside / "old")
        (beside / "new").rename(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error
    finally:
        if beside is not None:
            if (beside / "old").exists() and not path.exists():
                (beside / "old").rename(path)
            shutil.rmtree(beside, ignore_errors=True)
