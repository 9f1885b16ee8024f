"""The YAML dialect that configs are read and written in."""

import re
from typing import Any

import yaml

from rljax.errors import ConfigError


def _implicit_resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    """Returns PyYAML's rules for plain scalars, but 1e-4 is a number (as in YAML 1.2), 2026-01-01 is text."""
    number = re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    )
    dropped = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    resolvers = {
        first: [rule for rule in rules if rule[0] not in dropped]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":  # appended, so that whole numbers match first
        resolvers.setdefault(first, []).append(("tag:yaml.org,2002:float", number))
    return resolvers


class Loader(yaml.SafeLoader):
    """Reads a config; a duplicate key is an error, where PyYAML takes the last value."""

    yaml_implicit_resolvers = _implicit_resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes YAML that `Loader` reads back: text that `Loader` would read as a number is quoted."""

    yaml_implicit_resolvers = _implicit_resolvers()


Dumper.add_representer(tuple, lambda dumper, items: dumper.represent_list(items))


def parse_yaml(text: str, source: str, name_line: bool = True) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if name_line and error.problem_mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
