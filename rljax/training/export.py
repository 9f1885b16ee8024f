"""Exports a run's policy as a Hugging Face directory, its adapter for PEFT, and its EAGLE head for serving
engines.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import safetensors

from drafters.arguments import checked
from drafters.eagle.arguments import EagleArguments
from drafters.eagle.checkpoint import ServingEngine, save_head
from drafters.eagle.drafter import EagleDrafter
from drafters.eagle.head_state import nested_leaves
from rljax.assembly.saved_policy import SavedPolicy
from rljax.config.speculation import SpeculationConfig
from rljax.errors import CheckpointError
from rljax.models import peft
from rljax.models.huggingface import save_model
from rljax.training.model_card import model_card

_HEAD = "/train.params."  # between a head's name and its weights in a checkpoint's drafter state


def check_destination(destination: str | os.PathLike[str], force: bool, config: str = "config.json") -> Path:
    """Returns the resolved destination if an export may be written there.

    Args:
      destination: directory to write.
      force: whether to replace a model.
      config: file that makes a directory one of a model, or `adapter_config.json` of an adapter.

    Raises:
      CheckpointError: the destination holds a model and `force` is False, or it holds something that is not
        a model directory, which `force` does not replace either.
    """
    path = Path(destination).resolve()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return path
    if not (path / config).is_file():
        kind = "a model" if config == "config.json" else "an adapter"
        raise CheckpointError(f"{path} exists and is not {kind} directory; choose another one")
    if not force:
        raise CheckpointError(
            f"{path} holds a model already; choose another directory, or replace it: --force"
        )
    return path


def export_policy(
    saved: SavedPolicy, destination: str | os.PathLike[str], dtype: str = "float32", force: bool = False
) -> Path:
    """Writes a directory for `transformers`: weights, configs, tokenizer with its chat template, and a model
    card. It is written next to the destination and renamed when it is complete.

    Args:
      destination: directory to write; see `check_destination`.
      dtype: dtype of the weights: "float32", "bfloat16" or "float16".
      force: whether to replace an existing model.

    Returns:
      The directory.

    Raises:
      CheckpointError: the policy is not a run's, or the destination cannot be written.
    """
    if saved.experiment is None:
        raise CheckpointError(f"{saved.path} is a Hugging Face directory already; give a run directory")
    path, policy = check_destination(destination, force), saved.policy
    with _replacing(path) as partial:
        save_model(
            partial, policy.config, policy.params, dtype, policy.tokenizer_directory, policy.eos_token_ids
        )
        (partial / "README.md").write_text(model_card(saved, dtype, path.name), encoding="utf-8")
    return path


def export_adapter(
    saved: SavedPolicy, destination: str | os.PathLike[str], dtype: str = "float32", force: bool = False
) -> Path:
    """Writes the adapter of a run with LoRA in PEFT's format, with a model card. Arguments as in
    `export_policy`.

    Raises:
      CheckpointError: the run has no adapter, or the destination cannot be written.
    """
    if saved.experiment is None or saved.adapter is None:
        raise CheckpointError(f"{saved.path} has no adapter: it was trained without policy.lora")
    path, base = check_destination(destination, force, peft.CONFIG), saved.adapter.base
    settings, model = saved.experiment.policy.lora, saved.policy.config
    with _replacing(path) as partial:
        factors = saved.adapter.adapter.factors
        peft.save_adapter(partial, model, settings, factors, base, saved.adapter.base_digest, dtype)
        card = model_card(saved, dtype, path.name, adapter_of=base)
        (partial / "README.md").write_text(card, encoding="utf-8")
    return path


def export_head(
    saved: SavedPolicy,
    destination: str | os.PathLike[str],
    dtype: str = "float32",
    engine: ServingEngine = "sglang",
    force: bool = False,
) -> Path:
    """Writes the EAGLE head that was trained together with the policy. Other arguments as in `export_policy`.

    Args:
      engine: serving engine that will load the head (`drafters/eagle/checkpoint.py`).

    Raises:
      CheckpointError: the run has no EAGLE head, or the destination cannot be written.
    """
    state = saved.drafter_state()
    speculation = saved.experiment.speculation if saved.experiment is not None else SpeculationConfig()
    names = [name for name, kind in speculation.kinds.items() if kind == "eagle"] or ["eagle"]
    prefix = names[0] + _HEAD  # of several heads, the first
    tensors = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
    if not tensors:
        raise CheckpointError(f"{saved.path} has no EAGLE head at this step{_drafters_of(saved)}")
    arguments = speculation.arguments.get(names[0], {}) | {"save_dir": None}
    drafter = EagleDrafter(checked("speculation.args", "eagle", EagleArguments, arguments))
    drafter.reads(saved.policy.config, saved.policy.tokenizer)
    path = check_destination(destination, force)
    with _replacing(path) as partial:
        save_head(partial, drafter.config, nested_leaves(tensors), dtype, engine)
    return path


def _drafters_of(saved: SavedPolicy) -> str:
    names = [] if saved.experiment is None else saved.experiment.speculation.drafters
    return f"; its drafters: {', '.join(names)}" if names else ", as it was trained without a drafter"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Context that yields a new directory next to `path`, and renames it to `path` at the end. A previous
    directory is deleted only then; after an error it is unchanged.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.export-", dir=path.parent))
        yield scratch / "new"
        if path.exists():
            path.rename(scratch / "old")
        (scratch / "new").rename(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error
    finally:
        if scratch is not None:
            if (scratch / "old").exists() and not path.exists():
                (scratch / "old").rename(path)
            shutil.rmtree(scratch, ignore_errors=True)
