"""Kernels are read off compiled programs: the order of their sums, apart from how results are tiled."""

import json

from tests.scripts import load_script

TPU = """%fused (a: bf16[8,4096], b: bf16[12288,4096]) -> f32[8,12288] {{
  ROOT %c = f32[8,12288] convolution(%a, %b), dim_labels=bf_oi->bf
}}

ENTRY %main (x: bf16[8,4096], w: bf16[12288,4096]) -> f32[8,12288] {{
  ROOT %f = f32[8,12288] fusion(%x, %w), kind=kOutput, calls=%fused, backend_config={config}
}}
"""
GPU = """%gemm (p0: bf16[2,4,1024], p1: bf16[12288,4,1024]) -> f32[4,2,12288] {{
  %p1 = bf16[12288,{parts},1024]{{2,1,0}} parameter(1)
  ROOT %d = f32[4,12288,2] dot(%p1, %p0), lhs_batch_dims={{1}}, backend_config={{"sizes":["16"]}}
}}

ENTRY %main (x: bf16[2,4096], w: bf16[12288,4096]) -> f32[4,2,12288] {{
  ROOT %f = f32[4,2,12288] fusion(%x, %w), kind=kCustom, calls=%gemm, backend_config={config}
}}
"""


def _tpu(kernel, iterations, output):
    window = {"kernel_window_bounds": kernel, "output_window_bounds": output}
    window |= {"input_window_bounds": [], "iteration_bounds": iterations}
    config = {"window_config": window, "convolution_algorithm_config": {"emitter": "Emit"}}
    return TPU.format(config=json.dumps(config))


def test_a_tpus_windows_are_read():
    script = load_script("bench_rows")
    whole = script.kernels_of(_tpu(["112", "32"], ["14", "1", "1"], ["1", "7"]), "tpu")
    wider = script.kernels_of(_tpu(["56", "32"], ["28", "1", "1"], ["8", "7"]), "tpu")
    parts = script.kernels_of(_tpu(["112", "8"], ["14", "1", "4"], ["1", "7"]), "tpu")
    assert [kernel.pieces for kernel in whole + wider + parts] == ["32 x 1", "32 x 1", "8 x 4"]
    line = script._line("product", {1: whole, 8: wider})
    assert line.startswith("product: one order of sums for all rows (1, 8: Emit 32 x 1)")
    assert "2 orders of sums (1: Emit 32 x 1 | 64: Emit 8 x 4)" in script._line("p", {1: whole, 64: parts})


def test_a_gpus_split_sums_are_read():
    script = load_script("bench_rows")
    config = {"fusion_backend_config": {"kind": "__triton_nested_gemm_fusion"}}
    (kernel,) = script.kernels_of(GPU.format(parts=4, config=json.dumps(config)), "gpu")
    assert kernel.pieces == "4 parts, 16 at a time"
    assert "autotuning" in kernel.unknown
    program = "ENTRY %main (x: f32[2]) -> f32[2] {{\n  %a = f32[2] {}\n}}\n".format
    (library,) = script.kernels_of(program('custom-call(%x), custom_call_target="__cublas$gemm"'), "gpu")
    assert library.unknown == "the library chooses its kernel when it runs"
    assert script.kernels_of(program("add(%x, %x)"), "gpu") == []
