"""Freed memory stays with the process, so that a program's buffers are not new pages every time."""

import os
import resource
import subprocess
import sys

import pytest

import rljax.host_memory

_PROGRAM = """
import resource, statistics
import rljax
from rljax.host_memory import give_back
import jax, jax.numpy as jnp

@jax.jit
def program(x):
    y = jnp.dot(x, x.T)  # 36 MB, where glibc gives back more than 32
    return jnp.dot(y, x)

x = jnp.ones((3000, 8))
faults = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

arrays = [jnp.ones(16 << 20).block_until_ready() for _ in range(8)]  # 512 MB
del arrays
before = resident()
free = give_back()
print(statistics.median(faults[12:]), (before - resident()) / 1024, free / 2**20)
"""
_PAGES = 4 * 3000**2 / resource.getpagesize()


def _run(**environment: str) -> tuple[float, float, float]:
    """The usual number of pages that a run of the program touches for the first time, and megabytes that were
    given back afterwards, by the size of the process and by its own account.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    env = {**inherited, "JAX_PLATFORMS": "cpu", **environment}
    faults, megabytes, free = subprocess.check_output([sys.executable, "-c", _PROGRAM], env=env).split()
    return float(faults), float(megabytes), float(free)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_buffers_are_not_new_pages_and_much_is_given_back_between_phases():
    faults, megabytes, free = _run()
    assert faults < 0.1 * _PAGES
    assert megabytes > 450 and free > 450
    assert _run(MALLOC_ARENA_MAX="8")[0] > 0.9 * _PAGES  # the user's settings stay


@pytest.mark.parametrize(("platforms", "is_cpu"), [("cpu", True), ("cuda,cpu", False), ("tpu", False)])
def test_accelerators_and_the_users_settings_are_left_alone(monkeypatch, platforms, is_cpu):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert rljax.host_memory._computes_on_cpu() == is_cpu
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not rljax.host_memory.keep_freed_memory()
