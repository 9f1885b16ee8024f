"""A plan against the run: the same programs, the same bytes; and one line where it does not fit."""

import dataclasses
import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from rljax.assembly.policy import TOKENIZER_VOCAB, shape_config
from rljax.config import load_config
from rljax.engine import loop_choice
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError, UserError
from rljax.models.huggingface import load_model_config, load_params, save_model
from rljax.models.transformer import init_params
from rljax.planning import planner
from rljax.planning.hardware import GIB, Hardware
from rljax.planning.planner import default_lengths, make_plan, make_planning, tracing
from rljax.planning.pool import PlanningPool, Program, Recording, program_name
from rljax.planning.table import as_json, as_text
from rljax.planning.topologies import parse_topology
from rljax.training.session import run
from tests.configs import NEEDS_PAPERS
from tests.planning.test_topologies import HAS_TPU
from tests.scripts import load_script
from tests.training.tiny_run import HEAD, ONE_PASS, SHRINKING, write_config

ROOT = Path(__file__).resolve().parents[2]
ROOMY = Hardware("test", "cpu", 100 * GIB, 1e10, {"float32": 1e11, "bfloat16": 1e11}, 1e9, 1e9, 8)
TOOLS = "{names: [calculator], opening: '+', closing: '=', answer_opening: '<', answer_closing: '>'}"
BFLOAT16 = "policy.compute_dtype=bfloat16"
MEASURED_LOOP = "engine.decode_loop=auto"
HAS_CUDA = pytest.mark.skipif(
    not (importlib.util.find_spec("jax_cuda13_plugin") and shutil.which("ptxas")), reason="needs CUDA 13"
)


def _config(directory, *overrides):
    small = ["warm_start=null", "evaluation.problems=0"]
    return load_config(write_config(directory), [*small, *overrides])


class WhenCalled:
    """A program that is compiled when it is called, or looked into, for the first time."""

    def __init__(self, compiled):
        self.compiled = functools.cache(compiled)

    def __call__(self, *args):
        return self.compiled()(*args)

    def __getattr__(self, name):
        return getattr(self.compiled(), name)


def _plan(config, topology="cpu:1", hardware=ROOMY, **kwargs):
    lengths = default_lengths(config, None, None, 0.8)
    return make_plan(config, parse_topology(topology), lengths, hardware=hardware, **kwargs)


CASES = {
    "quantized, critic, lora, several buckets": [
        "algorithm={name: ppo, kl_coefficient: 0.1}",
        "policy.lora={rank: 4}",
        "speculation={drafter: quantized, verify_buckets: [8, 16]}",
        "engine.cache_buckets=[64,128]",
    ],
    "eagle": [
        "speculation.drafter=eagle",
        *ONE_PASS,
        f"speculation.args={HEAD.replace('depths: [2]', 'depths: [1, 2]')}",
    ],
    "tools, run-ahead": [
        "speculation.drafter=srt",
        *ONE_PASS,
        "speculation.run_ahead_below=1",
        SHRINKING,
        "engine.cache_buckets=[64,128]",
        f"tools={TOOLS}",
    ],
    "a loop that is measured": [SHRINKING, MEASURED_LOOP],
    "small model, several sizes": [
        "speculation={drafter: small_model, args: {path: SMALL_MODEL}, verify_buckets: [8]}",
        SHRINKING,
        "training.rows_per_microbatch=2",
    ],
}
MARKED = [pytest.param(name, marks=NEEDS_PAPERS if "run-ahead" in name else ()) for name in CASES]


@pytest.mark.default_cases("tools, run-ahead")
@pytest.mark.parametrize("name", MARKED)
def test_the_programs_of_a_plan_are_those_of_the_run(tmp_path, monkeypatch, name):
    overrides = CASES[name]
    if "small model" in name:
        model = _small_model(tmp_path, layers=2)
        overrides = [override.replace("SMALL_MODEL", model) for override in overrides]
    if MEASURED_LOOP in overrides:
        monkeypatch.setattr(loop_choice, "target", SimpleNamespace(platform=lambda: "gpu"))
        monkeypatch.setattr(loop_choice, "_ratio", lambda *_: 1.1)
    config = _config(tmp_path, *overrides, "training.steps=1", "tracking.report=false")
    run_keys, get = set(), ExecutablePool.get

    def recorded(pool, key, function, args, *rest, **options):
        run_keys.add(key)
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        shapes = jax.tree.map(lambda leaf: shape(leaf) if isinstance(leaf, jax.Array) else leaf, args)
        return WhenCalled(lambda: get(pool, key, function, shapes, *rest, **options))

    with monkeypatch.context() as patched:
        patched.setattr(ExecutablePool, "get", recorded)
        run(config)
    names = {program_name(key) for key in run_keys}
    with monkeypatch.context() as patched:
        patched.setattr(PlanningPool, "_compiled", _uncompiled)
        plan = _plan(config)
    # The pool of a run knows a program's architecture, and not whose it is.
    owners = {program.drafter for program in plan.programs} - {None}
    planned = {_without(owners, program.name) for program in plan.programs}
    assert planned <= names
    counts = Counter()
    for kind, count in plan.counts.items():
        counts[_without(owners, kind)] += count
    assert counts == Counter(key[0] for key in run_keys if key[0] != "train_init")


@pytest.mark.parametrize(
    ("topology", "overrides", "kinds"),
    [
        ("cpu:1", [MEASURED_LOOP], 1),
        ("cpu:1", ["engine.decode_loop=fixed"], 2),
        *(
            pytest.param(*case, marks=HAS_TPU)
            for case in (
                ("v5e:2x4", [MEASURED_LOOP], 2),
                ("v5e:2x4", [MEASURED_LOOP, "distributed.enabled=on"], 1),
                ("v5e:2x4", ["engine.decode_loop=until"], 1),
                ("v5p:2x2x2", [MEASURED_LOOP], 1),  # on two hosts
            )
        ),
    ],
)
def test_a_plan_counts_both_loops_where_a_call_may_take_either(tmp_path, topology, overrides, kinds):
    devices, recording = parse_topology(topology), Recording()
    planning, _ = make_planning(_config(tmp_path, *overrides), devices, ROOMY)
    with tracing(planning, devices):
        engine = planning.engine(recording)
        for compile_program in planning.plain(engine, planning.decode_params()).everything():
            compile_program()
    assert sum(key[0].startswith("generate") for key in recording._asked) == kinds


def _uncompiled(pool, key, lowered, tracing):
    """A program without its figures: which there are is known before any compiles."""
    named = pool._named
    return Program(named(program_name(key)), named(key[0]), pool._drafter, 1, 1, 1, tracing, 1.0, 1.0)


def _compile_only(monkeypatch, which):
    """Programs of which `which(pool, key)` holds; the others are counted."""
    compiled = PlanningPool._compiled

    def chosen(pool, key, *args):
        return (compiled if which(pool, key) else _uncompiled)(pool, key, *args)

    monkeypatch.setattr(PlanningPool, "_compiled", chosen)


def test_a_small_model_keeps_its_depth_in_the_plan_of_a_deeper_policy(tmp_path, monkeypatch):
    """Also with as many layers as the deeper of the two depths at which the policy is compiled."""
    _compile_only(monkeypatch, lambda pool, key: pool._drafter and key[0] == "draft_for")
    model = _small_model(tmp_path, layers=4)
    drafting = ["speculation.drafter=small_model", f"speculation.args={{path: {model}}}"]
    overrides = ["policy.shape.num_layers=12", "speculation.verify_buckets=[8]"]
    plan = _plan(_config(tmp_path, *overrides, *drafting))
    assert plan.depths == (2, 4)
    assert len(plan.run.drafters["small_model"].weights["layers"]) == 4
    assert plan.memory.draft_weights == sum(
        leaf.nbytes for leaf in jax.tree.leaves(load_params(model, load_model_config(model), "float32"))
    )
    kinds = {program.kind.split()[1]: program for program in plan.programs if program.drafter}
    assert set(kinds) == {"prefill", "insert", "extend", "draft_for"}
    assert kinds["draft_for"].total > plan.memory.draft_weights  # an argument
    assert sum(count for kind, count in plan.counts.items() if kind == "small_model extend") == 2


def _small_model(directory, layers):
    """A directory with a model of the tiny run's vocabulary."""
    shape = load_config(write_config(directory)).policy.shape
    model = dataclasses.replace(shape_config(shape, TOKENIZER_VOCAB), num_layers=layers)
    path = directory / "small_model"
    save_model(path, model, init_params(model, 1), "float32")
    return str(path)


def _without(owners, name):
    """A program's name or kind without the drafter in front of it."""
    return next((name.removeprefix(f"{owner} ") for owner in owners if name.startswith(f"{owner} ")), name)


def test_bytes_are_those_of_the_arrays(tmp_path, monkeypatch):
    _compile_only(monkeypatch, lambda pool, key: key[0] in ("apply", "gradients"))
    plan = _plan(_config(tmp_path))
    program = {program.kind: program for program in plan.programs}
    memory = plan.memory
    assert memory.moments == 2 * memory.weights + 8  # and two counters
    assert program["apply"].arguments == memory.weights + memory.moments + memory.gradients + 4
    cache = plan.run.state
    assert memory.cache == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert memory.decode_weights == 0  # float32 on one device: shared with the trainer
    held = memory.weights + memory.moments
    assert memory.least == {"rollout": held + memory.cache, "update": held + memory.gradients}
    assert memory.peak == max(peak for peak, _ in memory.peaks.values())
    assert memory.peak >= max(program.total for program in plan.programs)


def test_copies_for_the_micro_batches_are_counted_and_are_gone_when_the_optimizer_runs(tmp_path, monkeypatch):
    _compile_only(monkeypatch, lambda pool, key: key[0] in ("begin", "apply"))
    plans = [_plan(_config(tmp_path, BFLOAT16, f"training.cast_once={once}")) for once in ("true", "false")]
    matrices = [leaf for leaf in jax.tree.leaves(plans[0].run.train_state.params["layers"]) if leaf.ndim > 1]
    copies, none = (plan.memory.copies for plan in plans)
    assert copies == 2 * sum(leaf.size for leaf in matrices) and none == 0
    with_, without = ({program.kind: program for program in plan.programs} for plan in plans)
    assert with_["begin"].outputs == pytest.approx(without["begin"].outputs + copies, abs=1e3)
    assert with_["begin"].arguments == 2 * copies and without["begin"].arguments == 0
    assert with_["apply"] == dataclasses.replace(without["apply"], seconds=with_["apply"].seconds)
    least, less = (plan.memory.least["update"] for plan in plans)
    assert least == less + copies
    assert "copies of matrices, bfloat16 (update)" in as_text(plans[0])
    assert "copies of" not in as_text(plans[1])


@pytest.mark.long
@pytest.mark.parametrize("programs", ["gradients", "all"])
def test_extrapolating_in_depth_is_near_to_a_whole_compile(tmp_path, monkeypatch, programs):
    if programs == "gradients":
        _compile_only(monkeypatch, lambda pool, key: key[0] == "gradients")
    drafting = ("speculation.drafter=srt", "speculation.verify_buckets=[8]") if programs == "all" else ()
    config = _config(tmp_path, "policy.shape.num_layers=5", *drafting)
    whole = _plan(config, full_depth=True)
    short = _plan(config, full_depth=False)
    assert (whole.depths, short.depths) == (None, (2, 4))
    assert "extrapolated to 5 layers" in as_text(short)
    assert "extrapolated" not in as_text(whole)
    for a, b in zip(whole.programs, short.programs, strict=True):
        assert (a.name, a.arguments, a.outputs) == (b.name, b.arguments, b.outputs)
        # Layers may share the small temporaries of a program that only moves arrays.
        moves = a.kind in ("compact", "insert", "grow")
        assert b.temporaries == pytest.approx(a.temporaries, rel=0.15, abs=2e5 if moves else 2e4), a.name
    assert short.memory.peak == pytest.approx(whole.memory.peak, rel=0.05)
    assert short.step.update == whole.step.update


@pytest.mark.parametrize(
    ("key", "overrides", "program"),
    [
        ("engine.max_slots", ["engine={max_slots: 64, batch_buckets: [64], cache_buckets: [1024]}"], None),
        ("mesh.fsdp", ["policy.shape.hidden_size=2048", "policy.shape.mlp_size=8192"], None),
        ("training.rows_per_microbatch", ["training.rows_per_microbatch=2"], "gradients"),
        ("training.remat", [], "gradients"),
        ("training.cast_once", ["training.remat=true", BFLOAT16], "gradients"),
    ],
)
def test_too_little_memory_is_one_line_with_the_key(tmp_path, monkeypatch, key, overrides, program):
    """The program that needs most is named; where the arrays are too large, none is compiled."""

    def compiled(pool, key, *args):
        assert program is not None
        figures = _uncompiled(pool, key, *args)
        return dataclasses.replace(figures, temporaries=10**9) if key[0] == program else figures

    monkeypatch.setattr(PlanningPool, "_compiled", compiled)
    with pytest.raises(ConfigError if program is None else UserError) as error:
        _plan(_config(tmp_path, *overrides), hardware=dataclasses.replace(ROOMY, memory=16e6))
    said = str(error.value)
    assert said.startswith(f"{key}: the ") and "\n" not in said
    assert ("needs at least" if program is None else f" ({program} ") in said


def test_what_does_not_fit_the_topology_or_the_config(tmp_path):
    with pytest.raises(ConfigError, match="mesh: data 2"):
        _plan(_config(tmp_path, "mesh.data=2"))
    for median, longest, said in (
        (None, 49, r"at most rollout\.max_response_length 48"),
        (40, 30, "in this order"),
    ):
        with pytest.raises(ConfigError, match=said):
            default_lengths(_config(tmp_path), median, longest, 0.8)


def test_programs_compile_in_other_threads_and_the_first_error_ends_the_plan(tmp_path, monkeypatch):
    seen = set()

    def fails(pool, key, lowered, tracing):
        seen.add(threading.current_thread())
        raise RuntimeError(f"{key[0]} does not compile")

    monkeypatch.setattr(PlanningPool, "_compiled", fails)
    with pytest.raises(RuntimeError, match="begin does not compile"):
        _plan(_config(tmp_path))
    assert seen and threading.current_thread() not in seen
    assert not any(thread.is_alive() for thread in seen)


@HAS_TPU
def test_a_mesh_of_tpus(tmp_path, monkeypatch):
    _compile_only(monkeypatch, lambda pool, key: key[0] == "generate")
    overrides = ["policy.shape.num_kv_heads=2", "mesh={fsdp: 2, tensor: 2}", BFLOAT16]
    overrides += ["training.rows_per_microbatch=2"]
    config = _config(tmp_path, *overrides)
    plan = _plan(config, "v5e:2x4", hardware=None)
    text = as_text(plan)
    assert "v5e:2x4 (8 x TPU v5e)" in text
    assert "the other 4 devices of v5e:2x4 are idle" in text
    assert plan.memory.decode_weights > 0
    # On a TPU the cache is in the compute dtype: half of that of a CPU's plan.
    assert plan.run.state.cache.values[0].dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"mesh\.tensor: 4 devices cannot split the policy's num_heads 2"):
        _plan(_config(tmp_path, "mesh={tensor: 4}"), "v5e:2x4", hardware=None)


@HAS_CUDA
@pytest.mark.parametrize("kinds", ["generate", pytest.param("all", marks=pytest.mark.long)])
def test_one_gpu(tmp_path, monkeypatch, kinds):
    """With its defaults: in bfloat16, and with the kernels for Hopper."""
    _compile_only(monkeypatch, lambda pool, key: kinds in (key[0], "all"))
    plan = _plan(_config(tmp_path), "h100:1", hardware=None)
    assert plan.run.config.policy.compute_dtype == "bfloat16"
    assert {program.kind for program in plan.programs} >= {"generate", "gradients", "apply", "prefill"}
    assert json.loads(json.dumps(as_json(plan)))["topology"] == "h100:1"


@pytest.fixture
def compilation_cache():
    """Leaves JAX's compilation cache as it was: the command turns it off."""
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def test_train_plan_is_for_the_devices_that_are_here(tmp_path, capsys, monkeypatch, compilation_cache):
    monkeypatch.setattr(planner, "hardware_of", lambda topology, dtype: ROOMY)
    _compile_only(monkeypatch, lambda pool, key: False)
    file, out = write_config(tmp_path), tmp_path / "plan.json"
    overrides = [f"mesh.data={jax.device_count()}", "speculation.drafter=srt", "training.steps=7"]
    overrides += ["speculation.verify_buckets=[8]", f"training.rows_per_microbatch={jax.device_count()}"]
    assert load_script("train").main(["--config", str(file), "--plan", "--json", str(out), *overrides]) == 0
    assert "most at a time, update" in capsys.readouterr().out
    plan = json.loads(out.read_text())
    assert plan["topology"] == f"cpu:{jax.device_count()}"
    assert plan["command"] and plan["machine"]["jax"] == jax.__version__
    assert plan["step"]["rollout"]["drafted"]["tokens_per_second"] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_eight_cpu_devices_from_the_command_line(tmp_path):
    """In a process that forces them; one batch, one cache, and no evaluation."""
    command = [sys.executable, ROOT / "scripts" / "plan.py", "--config", write_config(tmp_path)]
    overrides = ["mesh={data: 2, fsdp: 2, tensor: 2}", "engine.max_slots=8", "engine.batch_buckets=[8]"]
    overrides += ["training.rows_per_microbatch=4", "policy.shape.num_kv_heads=2"]
    done = subprocess.run(
        [*command, "--topology", "cpu:8", *overrides], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "cpu:8 (8 x this CPU), mesh: data 2, fsdp 2, tensor 2" in done.stdout


def test_a_wrong_name_on_the_command_line_is_one_line(tmp_path, monkeypatch, capsys, compilation_cache):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as the command does
    assert load_script("plan").main(["--config", str(write_config(tmp_path)), "--topology", "tpu:8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: topology: unknown devices 'tpu'") and error.count("\n") == 1
