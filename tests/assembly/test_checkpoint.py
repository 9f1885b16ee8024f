"""Run checkpoints: the same bits back, a killed or failed save invisible, damage named, donation harmless."""

import json
import os
import shutil
import signal
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.assembly.checkpoint import RunCheckpoints, template_of
from rljax.errors import CheckpointError
from tests.devices import run_on_devices
from tests.fork_server import run


def make_state(seed: int, width: int = 16):
    """Parameters and AdamW state of a small policy, with float32 and bfloat16 weights."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    params = {
        "embedding": normal(32, width),
        "layers": [
            {"query": normal(width, width), "norm": normal(width)},
            {"query": normal(width, width).astype(jnp.bfloat16), "norm": normal(width)},
        ],
    }
    optimizer = optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim >= 2, tree))
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_state = jax.tree.map(lambda leaf: normal(*leaf.shape).astype(leaf.dtype), opt_state)
    return jax.device_put({"params": params, "opt_state": opt_state, "step": np.int32(seed)})


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        same = np.asarray(a).tobytes() == np.asarray(b).tobytes()  # apart: pytest would print megabytes
        assert same, path


def saved(directory: Path, steps=(1, 2), keep: int = 2) -> RunCheckpoints:
    checkpoints = RunCheckpoints(directory, keep)
    for step in steps:
        checkpoints.save(step, make_state(step), {"position": 10 * step})
    checkpoints.close()
    return checkpoints


def test_round_trip_is_bit_for_bit(tmp_path):
    state = make_state(7)
    special = np.array([np.nan, -np.nan, -0.0, np.inf, 1e-45], np.float32)
    state["special"] = jax.device_put(special)
    host_state = {"position": 12, "rounds": [1, 2.5, None, "text"], "nested": {"on": True}}
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest_step() is None
    checkpoints.save(3, state, host_state)
    checkpoints.close()

    fresh = RunCheckpoints(tmp_path / "checkpoints", keep=2)
    step, restored, restored_host = fresh.restore(jax.eval_shape(lambda: state))
    assert (step, restored_host) == (3, host_state)
    assert_same_bits(restored, state)


def test_leaves_come_back_as_the_template_has_them(tmp_path):
    device = jax.devices()[0]
    state = {
        "committed": jax.device_put(jnp.ones(3), device),
        "uncommitted": jnp.ones(3),
        "numpy": np.arange(3),
    }
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    _, restored, _ = checkpoints.restore(state)
    assert restored["committed"].committed
    assert not restored["uncommitted"].committed
    assert type(restored["numpy"]) is np.ndarray
    template = template_of(state)
    assert not any(isinstance(leaf, jax.Array) for leaf in template.values())
    _, again, _ = checkpoints.restore(template)
    assert_same_bits(again, restored)
    assert again["committed"].committed and not again["uncommitted"].committed


def test_an_old_one_that_has_to_stay_is_no_failure(tmp_path, monkeypatch):
    """As on NFS, while another process reads it. What is left of it is cleared away later."""
    checkpoints = saved(tmp_path, steps=(1,), keep=1)

    def busy(path, ignore_errors=False):
        assert ignore_errors or path.name == "1"
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        checkpoints.save(2, make_state(2), {})
        checkpoints.close()
    assert checkpoints.steps() == [2]
    checkpoints.save(3, make_state(3), {})
    checkpoints.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]


def test_all_is_on_disk_before_the_seal_which_lists_it(tmp_path, monkeypatch):
    """A power cut after the seal must not find empty files: Orbax leaves that to the file system."""
    synced, fsync = [], os.fsync

    def noting(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, make_state(1), {}, {"history": np.arange(3)})
    checkpoints.close()
    path = tmp_path / "checkpoints" / "1"
    seal = synced.index(path / ".checkpoint.json.tmp")
    assert set(synced[:seal]) >= {*path.rglob("*")} - {path / "checkpoint.json"}
    assert set(synced[seal:]) >= {path, path.parent, tmp_path}
    listed = json.loads((path / "checkpoint.json").read_text())
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files - listed["files"].keys() == {"checkpoint.json"}
    assert listed["leaves"]["params.embedding"] == "float32[32, 16]"


def test_a_step_is_saved_once_and_never_back_in_time(tmp_path):
    checkpoints = saved(tmp_path, steps=(9, 10))
    checkpoints.save(10, make_state(5), {})
    checkpoints.close()
    assert_same_bits(checkpoints.restore(make_state(0))[1], make_state(10))
    with pytest.raises(ValueError, match="step 9 is not after the newest checkpoint's, 10"):
        checkpoints.save(9, make_state(9), {})


def test_unfinished_newest_is_passed_over_and_cleared(tmp_path):
    checkpoints = saved(tmp_path)
    (tmp_path / "2" / "checkpoint.json").unlink()
    assert checkpoints.latest_step() == 1
    step, state, _ = checkpoints.restore(make_state(0))
    assert step == 1
    assert_same_bits(state, make_state(1))
    assert (tmp_path / "2").exists()  # a reader deletes nothing: the run may be in the middle of a save

    checkpoints.save(2, make_state(4), {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert_same_bits(checkpoints.restore(make_state(0))[1], make_state(4))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[: len(content) // 2], "bytes, but"),
        (lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:], "differs from what was"),
        (None, "cannot be read"),
    ],
    ids=["truncated", "bit flip", "missing"],
)
def test_damage_is_named(tmp_path, damage, words):
    checkpoints = saved(tmp_path)
    files = [file for file in (tmp_path / "2" / "arrays").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(make_state(0))
    message = str(caught.value)
    assert str(file) in message and words in message and "\n" not in message
    assert f"delete {tmp_path / '2'} to go on from step 1" in message

    shutil.rmtree(tmp_path / "2")  # following the advice
    assert checkpoints.restore(make_state(0))[0] == 1


def test_nothing_to_restore_and_a_damaged_seal(tmp_path):
    checkpoints = saved(tmp_path / "damaged", steps=(1,))
    (tmp_path / "damaged" / "1" / "checkpoint.json").write_text('{"leaves": ')
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: damaged; delete .* to start over"):
        checkpoints.restore(make_state(0))
    checkpoints = RunCheckpoints(tmp_path / "none", keep=1)
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint$"):
        checkpoints.restore(make_state(0))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint of step 5"):
        saved(tmp_path / "two").restore(make_state(0), step=5)
    assert not (tmp_path / "none").exists()


def test_another_tree_or_shape_names_the_first_difference(tmp_path):
    checkpoints = saved(tmp_path)
    more, less, other = make_state(0), make_state(0), make_state(0)
    more["params"]["layers"][1]["bias"] = np.zeros(16, np.float32)
    del less["step"]
    other["params"]["embedding"] = np.asarray(other["params"]["embedding"]).astype(jnp.bfloat16)
    for template, message in (
        (make_state(0, width=8), r"mu\.embedding is float32\[32, 16\] .* but float32\[32, 8\] in this"),
        (more, r"params\.layers\.1\.bias is absent .* but float32\[16\] in this"),
        (less, r"step is int32\[\] in the checkpoint, but absent in this run"),
        (other, r"params\.embedding is float32\[32, 16\] .* bfloat16\[32, 16\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(template)


def test_donation_and_mutation_right_after_save(tmp_path):
    """The loop donates its state to the next update while the background write is still going on."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    start = {name: np.arange(1 << 20, dtype=np.int32) + i for i, name in enumerate("abcdef")}
    control = update(start)
    update(control)
    assert control["a"].is_deleted()  # this backend does donate: what follows is not vacuous

    state, host_array, host_state = update(start), np.arange(1 << 20), {"seen": [1]}
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    checkpoints.save(1, {"device": state, "host": host_array}, host_state)
    for _ in range(5):
        state = update(state)
    host_array[:] = -1
    host_state["seen"].append(2)
    jax.block_until_ready(state)
    checkpoints.close()

    _, restored, restored_host = checkpoints.restore({"device": state, "host": host_array})
    expected = {"device": {name: leaf * 2 + 1 for name, leaf in start.items()}, "host": np.arange(1 << 20)}
    assert_same_bits(restored, expected)
    assert restored_host == {"seen": [1]}


def test_host_state_and_leaves_must_be_storable(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    for state, host_state, error, says in (
        ({}, {"pair": (1, 2)}, TypeError, "only JSON values"),
        ({}, {1: "text"}, TypeError, "only JSON values"),
        ({}, {"loss": float("nan")}, TypeError, "only JSON values"),
        ({"count": 3}, {}, TypeError, "count: int is not an array"),
        ({"key": jax.random.key(0)}, {}, TypeError, "key: .* is not an array of numbers"),
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {}, ValueError, r"a\.b: two leaves"),
    ):
        with pytest.raises(error, match=says):
            checkpoints.save(1, state, host_state)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_refuses_is_one_line(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot be read \(Not a directory\)$"):
        RunCheckpoints(tmp_path / "file", keep=1).save(1, make_state(1), {})
    monkeypatch.setattr(Path, "mkdir", refuse)  # root, as in containers, may write anywhere
    says = r"checkpoint of step 1 could not be written \(Permission denied\); there is no older one$"
    with pytest.raises(CheckpointError, match=says):
        RunCheckpoints(tmp_path / "run", keep=1).save(1, make_state(1), {})


def test_full_disk_keeps_the_older_checkpoint_and_recovers(tmp_path):
    """A limit on file sizes fails a write in its middle, as a full disk does."""
    status, output, errors = run(
        textwrap.dedent("""
        import resource, signal, sys
        import jax.numpy as jnp
        from rljax.errors import CheckpointError
        from rljax.assembly.checkpoint import RunCheckpoints

        def state(value):
            return {"weight": jnp.full((200_000,), float(value))}

        checkpoints = RunCheckpoints(sys.argv[1], keep=2)
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            checkpoints.save(2, state(2), {})
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
        print(checkpoints.steps(), checkpoints.restore(state(0))[1]["weight"][0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpoints.save(3, state(3), {})
        checkpoints.close()
        print(checkpoints.steps(), checkpoints.restore(state(0))[1]["weight"][0])
        """),
        tmp_path,
    )
    assert (status, errors) == (0, "")  # not a word of Orbax's over the progress display
    assert output.splitlines() == [
        f"{tmp_path}: the checkpoint of step 2 could not be written (File too large);"
        " that of step 1 is still good",
        "[1] 1.0",
        "[1, 3] 3.0",
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "3"]


def test_killed_in_the_middle_of_saving(tmp_path):
    status, _, errors = run(
        textwrap.dedent("""
        import os, signal, sys
        import jax.numpy as jnp
        from rljax.assembly.checkpoint import RunCheckpoints

        checkpoints = RunCheckpoints(sys.argv[1], keep=1)
        for step in (1, 2):
            state = {str(i): jnp.full((1 << 20,), step * 100 + i) for i in range(16)}
            checkpoints.save(step, state, {"position": step})
            if step == 1:
                checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        """),
        tmp_path,
    )
    assert status == -signal.SIGKILL, errors
    assert (tmp_path / "2").exists() and not (tmp_path / "2" / "checkpoint.json").exists()
    template = {str(i): np.zeros(1 << 20, np.int32) for i in range(16)}
    step, state, host_state = RunCheckpoints(tmp_path, keep=1).restore(template)
    assert (step, host_state) == (1, {"position": 1})
    assert_same_bits(state, {str(i): np.full(1 << 20, 100 + i, np.int32) for i in range(16)})


ON_MESHES = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rljax.assembly.checkpoint import RunCheckpoints

def shardings(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    return {"split": NamedSharding(mesh, P("fsdp")), "replicated": NamedSharding(mesh, P())}

update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
start = {"split": np.arange(1 << 20), "replicated": np.arange(1 << 20) + 5}
state = update(jax.device_put(start, shardings(4)))
checkpoints = RunCheckpoints(sys.argv[1], keep=1)
checkpoints.save(1, state, {})
for _ in range(5):
    state = update(state)
jax.block_until_ready(state)
checkpoints.close()
same = []
for wanted in (shardings(4), shardings(2)):
    shape = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    _, restored, _ = checkpoints.restore(jax.tree.map(shape, state, wanted))
    for name, sharding in wanted.items():
        assert restored[name].sharding == sharding, restored[name].sharding
        same.append(np.array_equal(restored[name], start[name] * 2 + 1))
print("FOUND" + json.dumps(same))
"""


def test_shardings_are_the_templates(tmp_path):
    """Saved from four devices while a donating update runs, restored on another mesh of two."""
    assert run_on_devices(ON_MESHES, 4, tmp_path) == [True] * 4
