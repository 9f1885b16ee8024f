"""rljax/accelerators.py: the first line of a run, and the silence of compilers whose devices are not here."""

import os
import subprocess
import sys

import jax
import pytest

from rljax import accelerators
from tests.scripts import SCRIPTS


def test_the_first_line_tells_devices_number_type_and_cache(tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    line = accelerators.start_line("float32", cache)
    count, platform = jax.device_count(), jax.devices()[0].platform
    assert line.startswith(f"device: {count} x ") and (platform != "cpu" or " x cpu (" in line)
    assert line.endswith(f", float32; no compiled programs found in {cache}")
    monkeypatch.setattr("rljax.engine.stored_programs.count_stored", lambda _: 12)
    if count == 1:
        assert accelerators.cache_in_words(cache) == f"12 compiled programs found in {cache}"
    assert accelerators.cache_in_words(None) == "compiled programs are not kept"


def without_platforms(code: str) -> subprocess.CompletedProcess:
    """Runs code in a process that nobody has told which devices to use."""
    environment = {name: value for name, value in os.environ.items() if name not in accelerators._ASKED_FOR}
    environment["PYTHONPATH"] = str(SCRIPTS.parent)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(accelerators._device_seen(), reason="an accelerator is here")
@pytest.mark.parametrize("first", ["", "import jax\n"], ids=["before JAX", "after JAX"])
def test_compilers_of_absent_devices_print_nothing(first):
    """With the extra `compilers`, the TPU's library prints warnings and a location trace otherwise."""
    code = f"{first}from rljax.accelerators import *\nskip_absent()\nprint(devices_in_words())"
    ran = without_platforms(code)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("\n") == 1 and "x cpu (" in ran.stdout


def test_a_device_or_a_wish_is_left_alone(monkeypatch):
    for name in accelerators._ASKED_FOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("the platform was changed"))
    for seen, known in ((True, True), (False, False)):
        monkeypatch.setattr(accelerators, "_device_seen", lambda seen=seen: seen)
        monkeypatch.setattr(accelerators, "_only_known_plugins", lambda known=known: known)
        accelerators.skip_absent()
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setattr(accelerators, "_only_known_plugins", lambda: True)
    accelerators.skip_absent()
    assert "JAX_PLATFORMS" not in os.environ


def test_another_plugin_is_seen(tmp_path, monkeypatch):
    assert isinstance(accelerators._only_known_plugins(), bool)
    for name, known in (("xla_cuda13", True), ("another", False)):
        (tmp_path / name).mkdir()
        specification = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
        monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda _, found=specification: found)
        assert accelerators._only_known_plugins() is known
