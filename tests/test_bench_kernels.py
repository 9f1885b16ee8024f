"""The kernel benchmark's cases: what is compared computes the same, and what is given up comes back."""

import importlib
import json
import types

import jax
import numpy as np
import pytest

from rljax.errors import UserError
from rljax.kernels import switch, tuned
from tests.scripts import load_script

bench_kernels = load_script("bench_kernels")
timing = load_script("kernel_benchmarks.timing")


def test_what_is_given_up_comes_back(sets=3):
    """Compaction writes the cache in place: every program finds the cache of the one before."""
    case = bench_kernels.op_cases("compaction", quick=True)[0]
    timed = timing.Timed(case, ["xla"], most_sets=sets)
    taken = timed.seconds(calls=4, repeats=2)
    assert len(taken["xla"]) == 2 and len(timed._sets) == sets
    for arguments in timed._sets:
        assert not any(argument.is_deleted() for argument in arguments)


class Slow(timing.Timed):
    """Two functions that take the seconds of their names, in a program of one call each."""

    def __init__(self, seconds):
        self.functions, self.refused, self.programs = {name: float(name) for name in seconds}, {}, []
        self._sets = [()]

    def _once(self, function, programs):
        self.programs.append(programs)
        if function > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nat all")
        return function


def test_what_takes_long_is_called_less_and_what_finds_no_memory_not():
    """All repeats of a function take about a second, or three calls."""
    timed = Slow(["0.001", "0.01"])
    taken = timed.seconds(calls=32, repeats=15)
    assert {name: len(each) for name, each in taken.items()} == {"0.001": 15, "0.01": 15}
    assert sorted(set(timed.programs)) == [1, 6, 32]
    taken = Slow(["0.001", "3"]).seconds(calls=32, repeats=15)
    assert {len(each) for each in taken.values()} == {3}
    timed = Slow(["1", "9"])
    assert list(timed.seconds(calls=2, repeats=2)) == ["1"]
    assert timed.refused == {"9": "RESOURCE_EXHAUSTED: no memory"}


def test_an_implementation_that_not_all_operations_have():
    """Those without it are left out; a name that none has is one error."""
    benchmark = bench_kernels.BENCHMARK

    def sections(*arguments):
        return {each.section for each in benchmark.planned(benchmark.parser().parse_args(arguments))}

    assert sections("--implementation", "bfloat16") == {"quantized_product"}
    with pytest.raises(UserError, match="--implementation: 'float16' is not one; did you mean 'bfloat16'"):
        sections("--implementation", "float16")
    assert sections() == sections("--quick") == set(bench_kernels.OPS)


class Asked(Exception):
    """Carries the sizes that an operation's default depends on."""


@pytest.mark.parametrize("op", bench_kernels.OPS)
def test_a_case_names_the_sizes_that_the_default_depends_on(op, monkeypatch):
    case = bench_kernels.op_cases(op, quick=False)[0]
    args = jax.eval_shape(lambda: case.make(np.random.default_rng(0)))

    def call(op, implementation, sizes, *args, **kwargs):
        raise Asked(op, tuple(sizes))

    monkeypatch.setattr(switch, "call", call)
    monkeypatch.setattr(importlib.import_module(f"rljax.kernels.{op}"), "call", call, raising=False)
    with pytest.raises(Asked) as asked:
        jax.eval_shape(case.functions["xla"], *args)
    assert asked.value.args == (op, case.sizes)


@pytest.fixture
def tuning(tmp_path, monkeypatch):
    """Takes up rows of (operation, case, implementation, sizes, ratio): the exit status."""
    table = tmp_path / "tuned.json"
    monkeypatch.setattr(tuned, "TABLE", table)

    def run(*rows, accelerator="1 x NVIDIA H200"):
        rows = [{"name": f"{op}/{case}/{by}", "sizes": sizes, "ratio": r} for op, case, by, sizes, r in rows]
        results = tmp_path / "results.json"
        results.write_text(json.dumps({"machine": {"accelerator": accelerator}, "rows": rows}))
        status = bench_kernels.BENCHMARK.main(["--tune", str(results)])
        if status == 0:
            monkeypatch.setattr(tuned, "TUNED", tuned.load(table))
        return status

    monkeypatch.setattr(tuned.target, "device", lambda: types.SimpleNamespace(device_kind="NVIDIA H200"))
    return run


def test_results_become_the_default(tuning, capsys):
    """What is faster over all cases of some sizes, and clearly slower in none."""
    op, large, small = "quantized_product", [3584, 3584], [896, 4864]
    assert tuned.default(op, (3584, 3584)) == ("xla",)
    rows = [
        (op, "W4", "mosaic_gpu", large, 2.0),
        (op, "W4", "bfloat16", large, 9.0),  # no implementation
        (op, "W4", "interpret_gpu", large, 9.0),
        (op, "W8", "xla", large, 1.0),  # which the kernel refuses
        (op, "W4", "mosaic_gpu", small, 3.0),
        (op, "W8", "mosaic_gpu", small, 0.9),
    ]
    assert tuning(*rows) == 0
    assert "NVIDIA H200, quantized_product, 3584 x 3584: mosaic_gpu, xla (1.41" in capsys.readouterr().out
    assert tuned.default(op, (3584, 3584)) == tuned.default(op, (4096, 14_336)) == ("mosaic_gpu", "xla")
    assert tuned.default(op, (896, 4864)) == tuned.default(op, (895, 4864)) == ("xla",)
    assert tuned.default("round_to_nearest", (3584, 3584)) == ("xla",)
    assert tuning((op, "W4", "mosaic_gpu", large, 1.04)) == 0  # measured anew: not worth it
    assert tuned.default(op, (3584, 3584)) == ("xla",)
    assert tuning((op, "W4", "mosaic_gpu", large, 1.06)) == 0
    assert tuned.default(op, (3584, 3584)) == ("mosaic_gpu", "xla") and len(tuned.TUNED) == 1


def test_what_belongs_together_on_a_tpu_is_left_open(tuning, capsys):
    rows = [(op, "c", "mosaic_tpu", [4, 128], 2.0) for op in ("compaction", "noisy_argmax")]
    assert tuning(*rows, accelerator="4 x TPU v6 lite") == 0
    assert "compaction, 4 x 128: left out; name both" in capsys.readouterr().out
    assert tuned.TUNED == {("TPU v6 lite", "noisy_argmax"): [((4, 128), ("mosaic_tpu", "xla"))]}


def test_results_that_say_nothing_are_one_error(tuning, tmp_path, capsys):
    assert tuning(accelerator=None) == 2
    (tmp_path / "other.json").write_text('{"rows": []}')
    for name in ("missing.json", "other.json"):
        assert bench_kernels.BENCHMARK.main(["--tune", str(tmp_path / name)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [each.split(": ")[2] for each in errors] == [
        "measured on a CPU, whose default is xla; measure on an accelerator",
        "cannot be read",
        "no results of bench_kernels.py",
    ]
    assert not tuned.TABLE.exists()
