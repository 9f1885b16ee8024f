"""The order of the packages, and no circles: read from every import of the source, wherever it stands."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = """
    host_memory, rljax, errors, progress, response_lengths, target, timing
    algorithms, durable_files, importing, provenance, rendezvous, sandbox
    config, processes, numerics, sampling, sharding, kernels, models
    hub, tools, tasks, environments, requests
    benchmarking, engine, accelerators, learning, drafters, speculation, rollout
    run_directory, tracking, reports
    assembly, cluster, evaluation, serving, agents, training
    papers, planning, simulation, benchmark_runs, commands, __main__
"""
"""From bottom to top, and in a line from left to right: none imports from one that comes later."""
SOCKET = ("rljax.config.wing", "rljax.papers.registry")
"""The one import that goes up: the config takes what the papers add there."""


def modules():
    """Every module of the program by name, with its source."""
    found = {}
    for path in (*ROOT.glob("rljax/**/*.py"), *ROOT.glob("drafters/**/*.py")):
        *parts, last = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts if last == "__init__" else (*parts, last))] = path.read_text(encoding="utf-8")
    return found


def imports(sources):
    """(module, imported module) of every import between them, those in functions and for types included."""
    found = set()
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: write whole names"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:  # a module, or a name in one
                module = target if target in sources else target.rpartition(".")[0]
                if module in sources and module != name:
                    found.add((name, module))
    return found - {SOCKET}


def package(module):
    """What of `LAYERS` a module belongs to."""
    return module.removeprefix("rljax.").split(".")[0]


def violations(found, order):
    return sorted(pair for pair in found if order[package(pair[0])] < order[package(pair[1])])


def circle(found):
    """Modules of which each imports the next and the last is the first; none where there is no circle."""
    imported = {}
    for module, target in found:
        imported.setdefault(module, set()).add(target)
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def positions():
    names = [name.strip() for line in LAYERS.strip().split("\n") for name in line.split(",")]
    assert len(names) == len(set(names))
    return {name: number for number, name in enumerate(names)}


def test_no_package_imports_from_one_above_it_and_no_files_in_a_circle():
    sources, order = modules(), positions()
    assert {"papers", *map(package, sources)} == set(order)  # that wing may be taken away
    found = imports(sources)
    assert len(found) > 1000
    assert violations(found, order) == []
    assert circle(found) == []


def test_an_import_is_seen_wherever_it_stands():
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rljax.training.loop import train\n"
        "def late():\n    from rljax.cluster import decoder\n    import rljax.serving.app\n"
    )
    there = dict.fromkeys(("rljax.training.loop", "rljax.cluster.decoder", "rljax.serving.app"), "")
    found = imports({"rljax.engine.engine": source, **there})
    assert found == {("rljax.engine.engine", name) for name in there}
    assert len(violations(found, positions())) == 3
    assert violations({(after, before) for before, after in found}, positions()) == []


def test_a_circle_is_found_over_several_files():
    found = circle({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")})
    assert len(found) == 4 and set(found) == {"a", "b", "c"}
    assert circle({("a", "b"), ("b", "c"), ("a", "c")}) == []


def test_the_page_on_the_design_has_the_same_order():
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    shown = page.partition("From bottom to top")[2].partition("```\n")[2].partition("```")[0]
    assert [line.strip() for line in shown.strip().split("\n")] == [
        line.strip() for line in LAYERS.strip().split("\n")
    ]
