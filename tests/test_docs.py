"""The pages agree with the code: links and anchors lead somewhere, config keys exist, and commands parse."""

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljax.commands.console import COMMANDS
from rljax.commands.console import main as rljax
from rljax.config.keys import KEYS
from rljax.config.wing import MISSING
from tests.scripts import SCRIPTS, load_script

ROOT = SCRIPTS.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

NO_KEYS = {"rollout.name", "rollout.temprature"}
"""Words that look like keys of ours and are none: a key of another library, a misspelling on purpose."""
OF_PAPERS = ("cluster.", "speculation.") if MISSING else ()
"""Where a page may name keys that are not here, nor what reads them: those of `rljax/papers`."""

_FENCED = re.compile(r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=fence)\s*$", re.S | re.M)
_INDENTED = re.compile(r"(?:^\n|\A)((?:^(?: {4}|\t)[^\n]*\n)+)", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SECTIONS = sorted({name.partition(".")[0] for name in KEYS if "." in name})
_KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z][a-z0-9_]*)+)(?![\w/(.-]*[/(*])")
_FILES = re.compile(r"\.(py|md|json|jsonl|yaml|html|ipynb|sh)$")


def prose(text: str) -> str:
    """A page without its code blocks."""
    return _FENCED.sub("", text)


def blocks(text: str) -> list[str]:
    """Fenced and indented code blocks of a page, but for Python."""
    fenced = [match["code"] for match in _FENCED.finditer(text) if match["language"] != "python"]
    indented = _INDENTED.findall(prose(text))
    return fenced + [re.sub(r"^(?: {4}|\t)", "", code, flags=re.MULTILINE) for code in indented]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", prose(page.read_text(encoding="utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_anchors_lead_somewhere(page):
    for link in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def test_the_pages_link_to_every_page():
    linked = {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    for page in PAGES:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            linked.add((page.parent / link.partition("#")[0]).resolve())
    assert [page.name for page in PAGES if page not in linked] == []


def is_key(name: str) -> bool:
    if name in KEYS or name.startswith(OF_PAPERS):
        return True
    parents = [name[: match.start()] for match in re.finditer(r"\.", name)]
    return any(parent in KEYS and KEYS[parent].free_form for parent in parents)


def keys_named(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming-from.md":  # the other columns are keys of others
        text = re.sub(r"^(\|[^|]*\|).*$", r"\1", text, flags=re.MULTILINE)
    for code in [*_INLINE.findall(prose(text)), *blocks(text)]:
        for match in _KEY.finditer(code):
            if not _FILES.search(match[1]):
                yield match[1]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_config_keys_exist(page):
    assert sorted({name for name in keys_named(page) if not is_key(name)} - NO_KEYS) == []


def commands(text: str) -> Iterator[list[str]]:
    """Commands of a page that run a script or `rljax`, as words: what follows them in a pipe is left out."""
    for code in [*_INLINE.findall(prose(text)), *blocks(text)]:
        for line in re.sub(r"\\\n\s*", " ", code).splitlines():
            for part in re.split(r"&&|\||;", re.sub(r"(^|\s)#.*", "", line)):
                match = re.search(r"(?:python3? scripts/(\w+)\.py|^\s*rljax ([a-z]+))(?=\s|$)(.*)", part)
                if match is None:
                    continue
                with contextlib.suppress(ValueError):  # an open quote: the line is part of a longer one
                    yield [match[1] or f"rljax {match[2]}", *shlex.split(match[3].replace("...]", "]"))]


@functools.cache
def help_of(name: str) -> str:
    """What a command prints for --help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as leaving:
        if name.startswith("rljax "):
            rljax([name.removeprefix("rljax "), "--help"])
        else:
            script = load_script(name)
            run = script.main if hasattr(script, "main") else script.BENCHMARK.parser().parse_args
            run(["--help"])
    assert leaving.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist_and_their_options_parse(page):
    for name, *words in commands(page.read_text(encoding="utf-8")):
        if name.startswith("rljax "):
            assert name.removeprefix("rljax ") in COMMANDS, f"{name}: no such command"
        else:
            assert (SCRIPTS / f"{name}.py").exists(), f"scripts/{name}.py: no such script"
        for word in words:
            option = word.lstrip("[").rstrip("]").partition("=")[0]
            if option.startswith("--"):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(name)), f"{name} has no {option}"


def test_these_checks_can_fail(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\n[a](gone.md) [b](#a-heading) `rollout.temprature` `task.args.a` `training/loop.py`\n"
        "\n"
        "```\nrljax train --config x.yaml \\\n    --confg y training.stepz=3 | tee log\n```\n\n"
        "    python scripts/gone.py --only rows  # and so on\n"
    )
    assert anchors(page) == {"a-heading"}
    assert {name for name in keys_named(page) if not is_key(name)} == {"rollout.temprature", "training.stepz"}
    assert sorted(commands(page.read_text())) == [
        ["gone", "--only", "rows"],
        ["rljax train", "--config", "x.yaml", "--confg", "y", "training.stepz=3"],
    ]
    assert "--config" in help_of("rljax train") and "--confg" not in help_of("rljax train")
    with pytest.raises(AssertionError, match=r"gone\.md"):
        test_links_and_anchors_lead_somewhere(page)
