"""Reads an `ExperimentConfig` from a YAML file and `key=value` overrides, and writes one."""

import json
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from rljax.config.keys import KEYS, unknown_key, without_numbers
from rljax.config.packaged import find_config, find_policy
from rljax.config.schema import ExperimentConfig
from rljax.config.yaml_dialect import Dumper, parse_yaml
from rljax.errors import ConfigError


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Reads the experiment in a YAML file, with `dotted.key=value` overrides (values are YAML) in order.

    A bare name such as "quickstart", where no such file exists, is that of a config that comes with rljax.

    Raises:
      ConfigError: an invalid config; one line that names the key or the file, and the remedy.
    """
    config = make_config(read_mapping(path), overrides, str(path))
    if config.policy.path is not None:
        policy = config.policy.model_copy(update={"path": find_policy(config.policy.path)})
        config = config.model_copy(update={"policy": policy})
    return config


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a config's YAML file, unchecked; raises like `load_config`."""
    try:
        text = find_config(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the config: {reason}") from error
    data = parse_yaml(text, str(path))
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, got {_shown(data)}")
    return data


def make_config(data: dict[str, Any], overrides: Sequence[str], source: str) -> ExperimentConfig:
    """Makes the experiment of a mapping with overrides. Changes the mapping; errors name it by `source`."""
    for override in overrides:
        _apply_override(data, override, source)
    _open_empty_sections(data)
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _apply_override(data: dict[str, Any], override: str, source: str) -> None:
    """Sets one `dotted.key=value` in the parsed YAML, in place."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"{override}: not an override; write it as key=value")
    value = parse_yaml(text, name, name_line=False)
    node, parts = data, name.split(".")
    free_form = False  # below a dict such as task.args, whose keys belong to the task
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth])
        if not free_form:
            if prefix not in KEYS:
                raise ConfigError(unknown_key(name))
            key = KEYS[prefix]
            if key.items is not None:
                raise ConfigError(
                    f"{name}: {prefix} is a list; give it whole, as in '{prefix}=[{{...}}, ...]'"
                )
            free_form = key.free_form
            if key.section is None and not free_form:
                raise ConfigError(unknown_key(name))
            if key.optional and node.get(parts[depth - 1]) is None:
                raise ConfigError(
                    f"{name}: {source} has no {prefix} section to override;"
                    f" add one there, or give it whole: '{prefix}={{{'.'.join(parts[depth:])}:"
                    f" {text.strip()}, ...}}'"
                )
        if node.get(parts[depth - 1]) is None:
            node[parts[depth - 1]] = {}
        node = node[parts[depth - 1]]
        if not isinstance(node, dict):
            raise ConfigError(f"{prefix}: should be a section of keys, got {_shown(node)}")
    if not free_form and name not in KEYS:
        raise ConfigError(unknown_key(name))
    node[parts[-1]] = value


def _open_empty_sections(data: dict[Any, Any], prefix: str = "") -> None:
    """Replaces null by an empty section, unless null is valid: YAML reads a section without keys as null."""
    for name, value in data.items():
        key = KEYS.get(f"{prefix}{name}")
        if key is None:
            continue
        if value is None and not key.optional and (key.section or key.free_form):
            data[name] = {}
        elif isinstance(value, dict) and key.section:
            _open_empty_sections(value, f"{key.name}.")


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like something else)",
    "tuple_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
}


def _shown(value: Any) -> str:
    """Returns a value in YAML's notation on one line, shortened."""
    if value is None:
        return "nothing (null)"
    return textwrap.shorten(json.dumps(value, default=str, ensure_ascii=False), 80, placeholder=" ...")


def _explain(error: ValidationError) -> str:
    """Returns the most useful error of a validation as one line."""
    errors = error.errors(include_url=False)
    # A misspelt required key is both unknown and missing; the error about the unknown key shows the typo.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    name = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            return unknown_key(name)
        case "missing":
            key = KEYS[without_numbers(name)]
            purpose = key.field.description or (key.section.__doc__ if key.section else "") or ""
            return f"{name}: must be set. {purpose}".rstrip()
        case "value_error":
            return str(first["ctx"]["error"])
        case kind:
            expected = _EXPECTED.get(kind) or first["msg"].removeprefix("Input should be ")
            return f"{name}: should be {expected}, got {_shown(first['input'])}"


def to_yaml(config: ExperimentConfig) -> str:
    """Returns the whole config as YAML, defaults included; `load_config` reads the same config back."""
    return yaml.dump(config.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
