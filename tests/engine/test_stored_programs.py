"""Programs kept on disk: the same results without compiling, and compiled anew whenever anything differs."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from rljax.engine import stored_programs
from rljax.engine.executables import ExecutablePool
from tests.misbehaving_products import traced_anew


@struct.dataclass
class State:
    x: jax.Array
    label: str = struct.field(pytree_node=False, default="a")


_LEAST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def _nothing_in_the_cache_of_jax():
    before = getattr(jax.config, _LEAST)
    jax.config.update(_LEAST, 3600.0)
    yield
    jax.config.update(_LEAST, before)


def step(state: State, y):
    return state.replace(x=jnp.sin(state.x) + y), {"sum": jnp.sum(state.x), "none": None}


def arguments(size: int = 8):
    return State(jnp.arange(size, dtype=jnp.float32)), jnp.float32(2.0)


def run(directory, key="step", size: int = 8):
    """A new pool, as in another process: its result and itself."""
    pool = ExecutablePool(directory=directory)
    args = arguments(size)
    return pool.get(key, step, args, donate_argnums=(0,))(*args), pool


def programs(directory):
    return [path for path in (directory / "programs").glob("*/*") if path.is_file()]


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    (first, extra), compiled = run(tmp_path)
    (second, same), loaded = run(tmp_path)
    assert (compiled.compilations, compiled.loaded) == (1, 0)
    assert (loaded.compilations, loaded.loaded) == (0, 1)
    assert loaded.summary() == "programs: 1 in 0 s, 1 of them from disk; the largest takes 0 MB while it runs"
    np.testing.assert_array_equal(first.x, second.x)
    assert second.label == "a" and extra["sum"] == same["sum"] and same["none"] is None
    pool, args = ExecutablePool(directory=tmp_path), arguments()
    pool.get("step", step, args, donate_argnums=(0,))(*args)
    assert args[0].x.is_deleted()  # still donated


def test_a_program_from_the_cache_of_jax_is_not_kept(tmp_path):
    """Serialized once more it would not be whole; nor where this process asks for it again."""
    args = (jnp.arange(7, dtype=jnp.float32), jnp.float32(2.0))

    def own(x, y):
        return jnp.sort(jnp.cos(x) * y)[::-1]

    jax.config.update(_LEAST, 0.0)
    expected = ExecutablePool().get("own", own, args)(*args)
    with traced_anew():
        for _ in range(2):
            pool = ExecutablePool(directory=tmp_path)
            np.testing.assert_array_equal(pool.get("own", own, args)(*args), expected)
    assert not programs(tmp_path)


def test_without_a_directory_or_a_key_that_means_something_elsewhere_nothing_is_kept(tmp_path):
    run(None)
    assert not list(tmp_path.iterdir())
    run(tmp_path, key=("step", lambda: None))
    assert not programs(tmp_path)


@pytest.mark.parametrize("change", ["key", "shape", "source"])
def test_whatever_differs_is_compiled_anew(tmp_path, monkeypatch, change):
    run(tmp_path)
    if change == "source":
        monkeypatch.setattr(stored_programs, "_surroundings", lambda: "other source")
    _, pool = run(tmp_path, "other" if change == "key" else "step", 9 if change == "shape" else 8)
    assert (pool.compilations, pool.loaded) == (1, 0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not a program"])
def test_a_damaged_file_is_reported_and_compiled_anew(tmp_path, damage):
    run(tmp_path)
    (path,) = programs(tmp_path)
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        payload = pickle.dumps((b"nonsense", None))
        path.write_bytes(stored_programs.hashlib.sha256(payload).digest() + payload)
    with pytest.warns(UserWarning, match="compiled anew"):
        (state, _), pool = run(tmp_path)
    assert pool.compilations == 1
    np.testing.assert_allclose(state.x, np.sin(np.arange(8)) + 2.0, rtol=1e-6)
    assert run(tmp_path)[1].loaded == 1, "the good one is kept again"


def test_a_directory_that_cannot_be_written_is_reported_once(tmp_path):
    (tmp_path / "programs").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be kept"):
        (state, _), _ = run(tmp_path)
    np.testing.assert_allclose(state.x, np.sin(np.arange(8)) + 2.0, rtol=1e-6)


def test_only_the_latest_sources_are_kept(tmp_path, monkeypatch):
    for source in range(stored_programs._KEPT + 2):
        monkeypatch.setattr(stored_programs, "_surroundings", lambda source=source: f"source {source}")
        run(tmp_path)
        stamp = 1_000_000_000 + source
        stored_programs.os.utime(tmp_path / "programs" / f"source {source}", (stamp, stamp))
    assert len(list((tmp_path / "programs").iterdir())) == stored_programs._KEPT
    assert (tmp_path / "programs" / f"source {source}").exists()
