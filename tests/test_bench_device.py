"""The device benchmark's rows, and its command line."""

import json

import jax
import pytest

from rljax.numerics.kernel_choice import KernelChoice
from tests.scripts import load_script

bench_device = load_script("bench_device")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is an accelerator")
def test_a_cpu_is_only_looked_at(capsys):
    with pytest.raises(SystemExit):
        bench_device.main([])
    assert "--quick measures a tiny policy" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    output = tmp_path / "rows.json"
    assert bench_device.main(["--quick", "--kernels", "xla", "--output", str(output)]) == 0
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {
        "decode/tiny/xla/batch 1",
        "verify/tiny/xla/batch 1, 16 nodes",
        "self_draft/tiny/xla/batch 1/W4",
        "self_draft/tiny/xla/batch 1/W8",
    }
    decode = rows["decode/tiny/xla/batch 1"]
    assert decode["ratio"] == pytest.approx(decode["limit_ms"] / decode["step_ms"])
    assert rows["self_draft/tiny/xla/batch 1/W4"]["ideal_time_ratio"] < 1


def test_what_matters_most_is_measured_first():
    plan = bench_device.benchmark(None).plan
    assert [(each.section, each.what) for each in plan[:3]] == [
        ("Qwen2.5-7B", "batch 1"),
        ("Qwen2.5-7B", "drafts, batch 16"),
        ("Qwen2.5-7B", "batch 8"),
    ]
    assert {each.section for each in plan} == set(bench_device.POLICIES)


def test_shapes_are_those_of_the_models():
    """As published: 1.54 and 7.62 billion parameters."""
    from rljax.models.transformer import num_params

    counts = {name: num_params(config) / 1e9 for name, config in bench_device.POLICIES.items()}
    assert counts == {
        "Qwen2.5-1.5B": pytest.approx(1.54, abs=0.01),
        "Qwen2.5-7B": pytest.approx(7.62, abs=0.01),
    }


def test_weights_that_a_step_reads():
    params = bench_device.random_params(bench_device.TINY)
    every = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert bench_device.read_bytes(params) == every
    assert bench_device.read_bytes(params | {"lm_head": params["embed"]}) == every
    engine = bench_device.make_engine(bench_device.TINY, 64, KernelChoice())
    assert engine.buckets.batch == (64,) and not engine.buckets.verify
