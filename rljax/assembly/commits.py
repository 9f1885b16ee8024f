"""The commits of models that a config names on the hub (`rljax/hub.py`): a run keeps them in its config."""

from collections.abc import Iterator

from drafters.names import ARGUMENTS
from rljax.config import ExperimentConfig
from rljax.hub import pinned


def with_commits(config: ExperimentConfig, recorded: ExperimentConfig | None = None) -> ExperimentConfig:
    """Returns the config with the names of the hub `pinned`.

    Args:
      recorded: the config of the run that goes on; None for a new run.
    """
    data = config.model_dump()
    before = {} if recorded is None else recorded.model_dump()
    for *sections, key in _places(config):
        node, old = data, before
        for section in sections:
            node, old = node.get(section) or {}, old.get(section) or {}
        if node.get(key) is not None:
            node[key] = pinned(node[key], old.get(key))
    return config if data == config.model_dump() else ExperimentConfig.model_validate(data)


def _places(config: ExperimentConfig) -> Iterator[tuple[str, ...]]:
    """Yields the keys that may hold a name of the hub."""
    yield from (("policy", "path"), ("policy", "lora", "path"), ("algorithm", "teacher"))
    for name, kind in config.speculation.kinds.items():
        if kind in ARGUMENTS and "path" in ARGUMENTS[kind].model_fields:
            first = name == config.speculation.drafter
            yield ("speculation", *(("args",) if first else ("others", name)), "path")
