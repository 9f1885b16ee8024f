"""Configs for published models: they fit the devices that they name, and run here with their sizes cut."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from rljax.config import load_config
from rljax.errors import ConfigError
from rljax.models.transformer import num_params
from rljax.planning.planner import default_lengths, make_plan, plan_shapes, planned_policy
from rljax.planning.topologies import parse_topology
from rljax.run_directory import RunDirectory
from rljax.training.session import run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL_DEVICE = [
    "policy.compute_dtype=bfloat16",
    "engine.row_invariant=warn",
    "engine.max_slots=64",
    "engine.batch_buckets=[8,16,32,64]",
    "engine.cache_buckets=[256,512,768]",
    "speculation.max_batch=32",
    "speculation.verify_buckets=[16,32,64]",
    "training.rows_per_microbatch=2",
]
V5E_64 = [
    "mesh.fsdp=8",
    "engine.max_slots=64",
    "engine.batch_buckets=[8,16,32,64]",
    "speculation.max_batch=32",
    "rollout.max_response_length=3072",
    "engine.cache_buckets=[1024,2048,4096]",
    "training.pack_length=4096",
    "training.rows_per_microbatch=8",
]
CASES = [
    ("qwen2.5-0.5b", "cpu:1", []),
    ("qwen2.5-0.5b", "v5e:1x1", SMALL_DEVICE),
    ("qwen2.5-0.5b", "rtx4080:1", SMALL_DEVICE),
    ("qwen2.5-1.5b", "v5e:2x4", []),
    ("qwen2.5-1.5b", "h100:1", ["mesh.fsdp=1"]),
    ("qwen2.5-1.5b-lora", "v5e:1x1", []),
    ("qwen3-8b", "v5e:8x8", V5E_64),
    ("qwen3-8b", "v5p:2x2x2", []),
    ("qwen3-8b", "h100:8", []),
    ("deepseek-r1-distill-qwen-7b", "h100:8", []),
    ("deepseek-r1-distill-qwen-7b", "v5p:2x2x4", ["mesh.fsdp=4", "mesh.tensor=4"]),
    ("qwen2.5-32b", "v5p:2x4x4", []),
    ("qwen2.5-32b", "h100:32", []),
]
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-8b": 8_190_735_360,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
}


def _load(name, overrides=()):
    """A config, whose models' paths are relative to the repository."""
    path = f"policy.path={CONFIGS / 'models' / name.removesuffix('-lora')}"
    return load_config(CONFIGS / f"{name}.yaml", [path, *overrides])


def _require_compiler(topology):
    if topology.startswith("v") and not importlib.util.find_spec("libtpu"):
        pytest.skip("needs libtpu")
    cuda = importlib.util.find_spec("jax_cuda13_plugin") and shutil.which("ptxas")
    if topology.startswith(("h100", "rtx")) and not cuda:
        pytest.skip("needs CUDA 13")


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_published_number_of_parameters(name):
    assert num_params(planned_policy(_load(name))[0]) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "topology", "overrides"), CASES)
def test_arrays_take_at_most_three_quarters_of_the_memory(name, topology, overrides):
    _require_compiler(topology)
    config = _load(name, overrides)
    memory = plan_shapes(config, parse_topology(topology))
    available = 12e9 if topology == "cpu:1" else memory.available
    assert max(memory.least.values()) < 0.75 * available
    assert config.speculation.drafter is not None


# A TPU's compiler takes minutes for long sequences and many rows, which change no width and no sharding.
_SHORT = (
    "rollout.max_prompt_length=128",
    "rollout.max_response_length=128",
    "engine.cache_buckets=[256]",
    "engine.max_slots=8",
    "engine.batch_buckets=[8]",
    "speculation.max_batch=8",
    "speculation.verify_buckets=[16]",
    "training.pack_length=256",
)


@pytest.mark.parametrize(
    ("name", "topology", "overrides"),
    [
        ("qwen2.5-1.5b", "h100:1", ["mesh.fsdp=1", "training.rows_per_microbatch=1"]),
        ("qwen3-8b", "v5p:2x2x2", ["training.rows_per_microbatch=1", *_SHORT]),
    ],
)
@pytest.mark.long
def test_two_layers_of_it_compile(tmp_path, name, topology, overrides):
    """The widths and the mesh of the config, with two layers, one batch and one pass."""
    _require_compiler(topology)
    model = json.loads((CONFIGS / "models" / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_hidden_layers": 2}))
    few = [f"policy.path={tmp_path}", "engine.batch_buckets=[128]", "speculation.max_batch=128"]
    few += ["speculation.verify_buckets=[256]"]
    config = load_config(CONFIGS / f"{name}.yaml", [*few, *overrides])
    plan = make_plan(config, parse_topology(topology), default_lengths(config, None, None, 0.8))
    assert {program.kind for program in plan.programs} >= {"prefill", "generate", "verify", "gradients"}
    assert 0 < plan.memory.peak < plan.memory.available


def test_the_config_with_lora_is_for_a_chip_on_which_all_weights_do_not_fit():
    _require_compiler("v5e:1x1")
    config = _load("qwen2.5-1.5b-lora")
    memory = plan_shapes(config, parse_topology("v5e:1x1"))
    assert memory.gradients < 0.15 * 2**30  # of the factors alone
    all_weights = config.model_copy(update={"policy": config.policy.model_copy(update={"lora": None})})
    with pytest.raises(ConfigError, match=r"needs at least .* GiB a device, but one of v5e:1x1 .* has 15.8"):
        plan_shapes(all_weights, parse_topology("v5e:1x1"))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.long
def test_runs_two_steps_with_its_sizes_cut(tmp_path, name):
    data, asked = tmp_path / "problems.jsonl", [f"What is {i} plus {i % 7}?" for i in range(64)]
    problems = [{"problem": each, "question": each, "answer": f"#### {i}"} for i, each in enumerate(asked)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    shape = "{hidden_size: 64, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 64, mlp_size: 64}"
    overrides = [
        f"run_dir={tmp_path / 'run'}",
        "policy.path=null",
        f"policy.shape={shape}",
        f"task.args.path={data}",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_prompt_length=96",
        "rollout.max_response_length=32",
        "engine={max_slots: 4, batch_buckets: [4], cache_buckets: [128], compilation_cache: null,"
        " row_invariant: warn, compile: before}",
        "speculation.verify_buckets=[8]",
        "training.steps=2",
        "training.pack_length=256",
        "training.rows_per_microbatch=2",
        "mesh={data: 1, fsdp: 1, tensor: 1}",
        "evaluation.problems=0",
        "tracking.report=false",
    ]
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    run(config)
    metrics = RunDirectory(config.run_dir).read_metrics()
    assert [line["step"] for line in metrics] == [0, 1, 2]
    if config.policy.compute_dtype == "float32":
        assert all(line["mismatch/logprob_abs_max"] == 0.0 for line in metrics[1:])
