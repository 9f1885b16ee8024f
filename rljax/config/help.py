"""Every key with its type, default and reason: the text of `--help`."""

import textwrap
import types
import typing
from typing import Annotated, Any, Literal

import yaml

from rljax.algorithms.registry import ALGORITHMS, OVERLONG_SHARE
from rljax.config.keys import KEYS, Key
from rljax.config.yaml_dialect import Dumper


def type_name(annotation: Any) -> str:
    """Returns the type of a key for a reader, such as "list of int" or "null | text"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if arg is type(None) else type_name(arg) for arg in args)
    if origin is Literal:
        return " | ".join(args)
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "section"
    return {str: "text"}.get(annotation, annotation.__name__)


def _yaml_scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def default_text(key: Key) -> str:
    """Returns the default of a key as YAML, with the algorithms that have another; "required" without one."""
    if key.field.is_required():
        return "required"
    if key.name in ("training.pack_length", "training.rows_per_microbatch"):
        return "from the lengths"
    default = key.field.get_default(call_default_factory=True)
    text = _yaml_scalar(default)
    if key.parent != "algorithm":
        return text
    if key.leaf == "overlong_buffer":
        return f"{text}, dapo: max_response_length / {OVERLONG_SHARE}"
    for name, algorithm in ALGORITHMS.items():
        if algorithm.settings.get(key.leaf, default) != default:
            text += f", {name}: {_yaml_scalar(algorithm.settings[key.leaf])}"
    return text


def describe_keys(width: int = 100) -> str:
    """Every key with its type, default and reason, by section, for `--help`."""
    indent = " " * 6
    lines = []
    for key in KEYS.values():
        if key.section is not None or key.items is not None:
            purpose = ((key.section or key.items).__doc__ or "").strip()
            purpose = purpose if key.items is None else f"{key.field.description} Of each: {purpose}"
            lines += ["", *textwrap.wrap(f"{key.name}: {purpose}", width, subsequent_indent="  ")]
            continue
        head = f"  {key.name:<40} {type_name(key.field.annotation)}"
        default = f"[{default_text(key)}]"
        lines += textwrap.wrap(
            f"{head}  {default}", width, subsequent_indent=" " * 43, break_long_words=False
        )
        lines += textwrap.wrap(
            key.field.description or "", width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)
