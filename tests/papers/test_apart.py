"""The wing can be taken away: nothing else imports from it, and what needs it says so in one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.papers.apart import run_without_papers

ROOT = Path(__file__).parents[2]


def test_nothing_outside_names_the_wing_but_where_the_registry_is_read():
    """Neither in an import, wherever in a file, nor as a text to import by."""
    wing = ROOT / "rljax" / "papers"
    named = {
        str(file.relative_to(ROOT)): re.findall(r".*rljax(?:\.| import )papers.*", file.read_text("utf-8"))
        for folder in ("rljax", "drafters", "scripts")
        for file in (ROOT / folder).rglob("*.py")
        if wing not in file.parents
    }
    assert {file: lines for file, lines in named.items() if lines} == {
        "rljax/config/wing.py": [
            "    from rljax.papers import registry",
            '    if error.name != "rljax.papers":',
        ]
    }


WITHOUT = """
import importlib, json, pkgutil, sys
import drafters, rljax

for package in (rljax, drafters):
    assert package.__path__[0].startswith(sys.argv[1]), package
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:  # an optional package of somebody else's
            cause = error.__cause__ or error
            assert isinstance(cause, ModuleNotFoundError), module.name
            assert cause.name.split(".")[0] not in ("rljax", "drafters"), module.name
assert not any(name.startswith("rljax.papers") for name in sys.modules)

from drafters.registry import make_drafters
from rljax.config import describe_keys, load_config
from rljax.engine.buckets import Buckets
from rljax.errors import ConfigError
from rljax.rollout.collector import Scheduler
from rljax.speculation.managers.selection import StrategyChoice
from rljax.speculation.speculator import Speculator
from tests.tiny_policy import CheapTimes, assert_same, make_engine, make_params, make_requests, outcomes

path, found = f"{sys.argv[2]}/configs/quickstart.yaml", {"help": describe_keys()}
config = load_config(path, ["speculation.drafter=srt"])
engine = make_engine(buckets=Buckets((4,), (128,), (16,), 7))
params, requests = make_params(), make_requests()
expected, _ = Scheduler(engine, 4).run(params, requests)
choice = StrategyChoice(config.speculation, config.seed, engine)
speculator = Speculator(engine, make_drafters(config.speculation), 4, times=CheapTimes(), strategies=choice)
for _ in range(2):
    completions, statistics = Scheduler(engine, 4, None, speculator).run(params, requests)
    assert_same(completions, expected)
    speculator.learn(outcomes(requests, completions))
found["accepted"] = statistics.accepted
for override in sys.argv[3:]:
    try:
        load_config(path, [override])
    except ConfigError as error:
        found[override] = str(error)
print(json.dumps(found))
"""

NEEDS_IT = {
    "speculation.choice=bandit": "speculation.choice: should be expected or fixed, got 'bandit'; the papers'",
    "speculation.epsilon=0.2": "speculation.epsilon: unknown key; ",
    "speculation={toggle: {margin: 0.1}}": "speculation.toggle: unknown key; ",
    "cluster.pipe=ranked": "cluster.pipe: unknown key; ",
    "cluster.race=2": "cluster.race: unknown key; ",
    "cluster.spot.idle=1": "cluster.spot.idle: unknown key; ",
    "speculation.decoupled.window=3": "speculation.decoupled.window: unknown key; ",
    "speculation.run_ahead_below=2": "speculation.run_ahead_below: unknown key; ",
}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What an interpreter finds that has everything but the wing. The drafters are the ones that are here, so
    that numba finds their loops compiled.
    """
    copy = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("__pycache__", "papers")
    shutil.copytree(ROOT / "rljax", copy / "rljax", ignore=ignored)
    (copy / "drafters").symlink_to(ROOT / "drafters")
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WITHOUT, str(copy), str(ROOT), *NEEDS_IT]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_it_every_module_imports_and_the_default_policy_decodes(without):
    assert without["accepted"] > 0
    assert "speculation.strategies" in without["help"] and "speculation.epsilon" not in without["help"]


def test_what_needs_it_says_so_in_one_line(without):
    for override, begins in NEEDS_IT.items():
        assert without[override].startswith(begins) and "\n" not in without[override]
        assert without[override].endswith("need rljax/papers, which is not here")


_FILES = (
    *("architecture", "bad_input", "config", "config_changes"),
    *("contradictions", "coordinator", "registry", "router"),
)
REACHED = " or ".join([*(f"test_{name}.py" for name in _FILES), "simulation"])
"""Files of the default tier that meet what the wing adds to; `python -m tests.papers.apart` runs all."""


@pytest.mark.long
def test_without_it_the_rest_passes_its_tests():
    """All are collected, which imports whatever a test imports; those of `REACHED` run."""
    status, said = run_without_papers(["-n", "0", "-k", REACHED, "tests"])
    assert status == 0, said
    assert int(re.search(r"(\d+) passed", said)[1]) > 300
