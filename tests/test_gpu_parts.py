"""Functions of the parts of the report on a GPU; `test_gpu_report.py` runs the parts themselves."""

import pytest

from rljax.errors import UserError
from rljax.models.transformer import num_params
from tests.scripts import load_script

carry = load_script("gpu_parts.carry")
engines = load_script("gpu_parts.engines")
SHAPES = load_script("workloads").SHAPES

_PROGRAM = """HloModule jit_generate, is_scheduled=true

%fused_computation (param_0: f32[2]) -> f32[2] {
  %param_0 = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%param_0, %param_0)
}

%inner_body (arg.1: (s32[], f32[2])) -> (s32[], f32[2]) {
  %arg.1 = (s32[], f32[2]{0}) parameter(0)
  %gte.1 = f32[2]{0} get-tuple-element(%arg.1), index=1
  %fusion.9 = f32[2]{0} fusion(%gte.1), kind=kLoop, calls=%fused_computation
  ROOT %tuple.1 = (s32[], f32[2]{0}) tuple(%gte.1, %fusion.9)
}

%short_branch (arg.2: f32[2]) -> f32[2] {
  %arg.2 = f32[2]{0} parameter(0)
  ROOT %copy.2 = f32[2]{0} copy(%arg.2)
}

%long_branch (arg.3: f32[2]) -> f32[2] {
  %arg.3 = f32[2]{0} parameter(0)
  %copy.1 = f32[2]{0} copy(%arg.3)
  ROOT %fusion.8 = f32[2]{0} fusion(%copy.1), kind=kLoop, calls=%fused_computation
}

%command_buffer (arg.4: f32[2]) -> f32[2] {
  %arg.4 = f32[2]{0} parameter(0)
  ROOT %mosaic = (bf16[2,8]{1,0}, f32[2]{0}) custom-call(%arg.4), custom_call_target="mosaic_gpu_v2"
}

%body.2 (arg: (s32[], /*index=1*/f32[2])) -> (s32[], f32[2]) {
  %arg = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %bitcast.1 = f32[2]{0} bitcast(%arg)
  %call.1 = f32[2]{0} call(%bitcast.1), to_apply=%command_buffer
  %while.1 = (s32[], f32[2]{0}) while(%arg), body=%inner_body, backend_config={"known_trip_count":{"n":"5"}}
  %conditional.1 = f32[2]{0} conditional(%bitcast.1), branch_computations={%short_branch, %long_branch}
  ROOT %fusion.7 = (s32[], f32[2]{0}) fusion(%call.1), kind=kInput, calls=%fused_computation
}

ENTRY %main.3 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %while.2 = (s32[], /*index=1*/f32[2]{0}) while(%p), condition=%cond, body=%body.2
  ROOT %fusion.6 = f32[2]{0} fusion(%while.2), kind=kLoop, calls=%fused_computation
}
"""


def test_kernels_of_a_program():
    assert engines.kernels_of_loop(_PROGRAM) == 1 + 5 + 2 + 1  # call, loop, branch, fusion
    assert engines.kernels_of_program(_PROGRAM) == 9 + 1
    assert engines.kernels_of_loop("") is engines.kernels_of_program("") is None


def test_shapes_are_those_of_the_models():
    """As published, in billions of parameters."""
    counts = {name: num_params(SHAPES[name]) / 1e9 for name in SHAPES if name.startswith("Qwen")}
    published = {"Qwen3-1.7B": 1.72, "Qwen3-8B": 8.19, "Qwen2.5-0.5B": 0.49, "Qwen2.5-1.5B": 1.54}
    assert counts == pytest.approx(published, abs=0.01)


def test_bytes_that_a_step_reads():
    params = engines.random_params(SHAPES["tiny"])
    every = engines.read_bytes(params)
    assert engines.read_bytes(params | {"lm_head": params["embed"]}) == every
    assert engines.cache_bytes(SHAPES["tiny"], 3) == 3 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("weights-second-half", None, "weights-second-half: cannot be read"),
        ("weights-first-half", b"1", "weights-first-half: its digest is another one"),
        ("digests.json", None, "no digests.json"),
    ],
)
def test_a_half_that_has_not_arrived(tmp_path, capsys, name, content, error):
    carry.write_halves(b"12345", tmp_path)
    assert carry.read_halves(tmp_path) == b"12345"
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert carry.main(["join", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert error in message and message.count("\n") == 1


def test_a_policy_that_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        carry.split(tmp_path / "none.gguf", tmp_path)
