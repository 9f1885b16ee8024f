"""The pool of compiled programs: one program a key, and a clear error before a process has too many."""

import jax.numpy as jnp
import pytest

from rljax.engine import executables
from rljax.engine.executables import ExecutablePool, memory_mappings
from rljax.errors import UserError


def test_a_key_is_compiled_once():
    pool = ExecutablePool()
    programs = [pool.get(key, jnp.sin, (jnp.zeros(4),)) for key in ("a", "b", "a")]
    assert pool.compilations == len(pool) == 2 and programs[0] is programs[2] is not programs[1]
    assert "a" in pool and "c" not in pool


def test_too_many_programs_are_an_error(monkeypatch):
    pool = ExecutablePool()
    pool.get("a", jnp.sin, (jnp.zeros(4),))
    monkeypatch.setattr(executables, "_CHECKED_EVERY", 1)
    monkeypatch.setattr(executables, "memory_mappings", lambda: (60_000, 65_530))
    with pytest.raises(UserError, match=r"1 compiled programs take 60000 of the 65530 .*: list fewer"):
        pool.get("b", jnp.sin, (jnp.zeros(4),))
    pool.get("a", jnp.sin, (jnp.zeros(4),))  # what there is can still be used
    monkeypatch.setattr(executables, "memory_mappings", lambda: None)  # not on Linux
    pool.get("b", jnp.sin, (jnp.zeros(4),))


def test_mappings_are_counted():
    mappings = memory_mappings()
    assert mappings is None or 0 < mappings[0] < mappings[1]


def test_a_platform_that_does_not_say_what_its_programs_take():
    class Silent:
        def memory_analysis(self):
            return None

    assert executables.temporary_bytes(Silent()) == 0
