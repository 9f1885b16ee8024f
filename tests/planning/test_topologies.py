"""Names of topologies, and the one line for each that is wrong."""

import importlib.util
import subprocess
import sys

import pytest

from rljax.errors import ConfigError
from rljax.planning import topologies
from rljax.planning.topologies import compile_devices, parse_topology

HAS_TPU = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")


@pytest.mark.parametrize(
    ("name", "count"), [("v5e:2x4", 8), ("v5p:2x2x2", 8), ("v6e:8x8", 64), ("h100:32", 32), ("cpu:8", 8)]
)
def test_parses(name, count):
    assert parse_topology(name).num_devices == count


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "topology: unknown devices 'v9'; Known: cpu, h100"),
        ("h10:8", "did you mean 'h100'"),
        ("v5e", "'v5e' has no shape; write it as v5e:2x4"),
        ("v5e:", "has no shape"),
        ("v5e:0x4", "has no shape"),
        ("v5e:2x2x2", "has 3 dimensions, but v5e has 2"),
        ("v5p:2x2", "has 2 dimensions, but v5p has 3; write it as v5p:2x4x4"),
        ("h100:12", "should have up to 8 devices, or a multiple of 8"),
    ],
)
def test_refuses_in_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        parse_topology(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu:4096", "needs 4096 CPU devices"),
        pytest.param("v5e:3x7", "'v5e:3x7' is unknown to its compiler", marks=HAS_TPU),
    ],
)
def test_devices_that_do_not_exist(name, message):
    with pytest.raises(ConfigError, match=message):
        compile_devices(parse_topology(name))


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu is missing; pip install -e '\.\[compilers\]'"):
        compile_devices(parse_topology("v5e:2x4"))


@HAS_TPU
def test_one_chip_is_the_first_of_a_host_and_its_compiler_says_nothing():
    """In a process of its own: the library speaks when it is loaded."""
    code = (
        "from rljax.planning.topologies import compile_devices, parse_topology\n"
        "print(*[len(compile_devices(parse_topology(f'v5e:{shape}'))) for shape in ('1x1', '2x4')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("1 8\n", "")
