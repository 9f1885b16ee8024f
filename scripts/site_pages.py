"""Pages of the documentation site that are generated: hooks of MkDocs, which `mkdocs.yml` names.

The landing page is the README without its map. The reference of the config has every key of the schema; the
API has a page a package, from docstrings that are read without importing anything. Links to files outside
docs/, such as the results of benchmarks, lead to copies of them under `source/`.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

API = {
    f"rljax.{name}": name.capitalize()
    for name in (
        *("config", "training", "rollout", "engine", "speculation", "algorithms", "learning", "models"),
        *("sampling", "numerics", "kernels", "tasks", "tools", "sandbox", "evaluation", "serving"),
        *("planning", "reports", "tracking", "commands"),
    )
} | {"drafters": "Drafters"}
"""Packages of the API's reference, by import path."""

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}


def config_reference() -> str:
    """Returns the page with every key: name, type, default and reason, a section of the config a heading."""
    if str(ROOT) not in sys.path:  # for a checkout that is not installed
        sys.path.insert(0, str(ROOT))
    from rljax.config.help import default_text, type_name
    from rljax.config.keys import KEYS

    lines = [
        "# Every key of the config",
        "",
        "Generated from the schema (`rljax/config/`); `rljax train --help` prints the same. How files and"
        " overrides are read: [the config](../config.md).",
        "",
        "## The experiment",
        "",
        "The keys outside any section.",
        "",
    ]
    sections = [key for key in KEYS.values() if key.section or key.items]
    for section in [None, *sections]:
        if section is not None:
            inner = section.section or section.items
            lines += [f"## `{section.name}`", "", _text(" ".join((inner.__doc__ or "").split())), ""]
            if section.items is not None:
                lines += [f"A list of sections. {_text(section.field.description)}", ""]
            if section.optional:
                lines += ["The section may be `null`.", ""]
        for key in KEYS.values():
            if key.parent != (section.name if section else "") or key.section or key.items:
                continue
            default = "required" if key.field.is_required() else f"default `{default_text(key)}`"
            lines += [f"### `{key.name}` {{ #{key.name} }}", ""]
            lines += [f"`{type_name(key.field.annotation)}`, {default}", "", _text(key.field.description), ""]
    return "\n".join(lines)


def _text(description: str | None) -> str:
    return (description or "").replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")


def _generated() -> dict[str, str]:
    """Returns the text of every page. mkdocstrings fills in those of the API."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in _PAGES.items()}
    # The site's navigation replaces the map of folders.
    without_map = re.sub(r"^## Map\n.*?(?=^## )", "", pages["index.md"], flags=re.DOTALL | re.MULTILINE)
    pages["index.md"] = f"---\nhide: [navigation]\n---\n\n{without_map}"
    pages["reference/config.md"] = config_reference()
    for package, title in API.items():
        options = "    options:\n      show_root_heading: false\n"
        pages[f"reference/api/{package}.md"] = f"# {title}\n\n`{package}`\n\n::: {package}\n{options}"
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the API's pages into the navigation, and pages that it does not name at its end."""
    assert config.nav is not None
    api = [{title: f"reference/api/{package}.md"} for package, title in API.items()]
    nav = _replaced(config.nav, "reference/api", api)
    named = set(_leaves(nav))
    docs = Path(config.docs_dir)
    written = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    others = [page for page in written if page not in named]
    config.nav = [*nav, {"More": others}] if others else nav
    config.watch += [str(ROOT / source) for source in _PAGES]
    return config


def _replaced(node: Any, placeholder: str, value: list) -> Any:
    if isinstance(node, list):
        return [_replaced(each, placeholder, value) for each in node]
    if isinstance(node, dict):
        return {name: _replaced(each, placeholder, value) for name, each in node.items()}
    return value if node == placeholder else node


def _leaves(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [leaf for each in (node.values() if isinstance(node, dict) else node) for leaf in _leaves(each)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and copies of the files outside docs/ that pages link to."""
    texts = _generated()
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    linked = set()
    for file in list(files.documentation_pages()):
        linked |= {_outside(match[2], file.src_uri) for match in _LINK.finditer(file.content_string)}
    for path in sorted(linked - {None}):
        if (ROOT / path).is_file() and path not in _PAGES and not path.startswith("docs/"):
            files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links of a page that lead out of docs/, and those of files that are pages elsewhere."""
    here = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path = _outside(match[2], page.file.src_uri)
        if path is None:
            return match[0]
        anchor = match[2].partition("#")[2]
        if path in _PAGES:
            to = _PAGES[path]
        elif path.startswith("docs/"):
            to = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            to = f"source/{path}"
        else:
            to = ""  # a folder: the text says its name
        relative = posixpath.relpath(to, here or ".") if to else "#"
        return f"{match[1]}{relative}{'#' + anchor if anchor else ''}{match[3]}"

    return _LINK.sub(link, markdown)


def _outside(link: str, page: str) -> str | None:
    """Returns the path from the root of the repository that a link of a page leads to; None for a link to
    another site or, in a page of docs/, to another page.
    """
    if "://" in link or link.startswith(("#", "mailto:")):
        return None
    sources = {name: source for source, name in _PAGES.items()}
    base = sources.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(base), link.partition("#")[0]))
    if path.startswith("docs/") and page not in sources:
        return None
    return path if not path.startswith("..") else None
