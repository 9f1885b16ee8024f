"""Kernels and bytes are read off a compiled program's text."""

from tests.scripts import load_script

programs = load_script("compiled_programs")

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

_IN_PLACE = """%fused (a: bf16[8,64], b: bf16[1,64], c: s32[], d: bf16[512,64]) -> (bf16[8,64], bf16[4,64]) {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[1,64]{1,0} parameter(1)
  %c = s32[] parameter(2)
  %d = bf16[512,64]{1,0} parameter(3)
  %write = bf16[8,64]{1,0} dynamic-update-slice(%a, %b, %c, %c)
  %whole = bf16[512,64]{1,0} bitcast(%d)
  %taken = bf16[4,64]{1,0} dynamic-slice(%whole, %c, %c), dynamic_slice_sizes={4,64}
  ROOT %both = (bf16[8,64]{1,0}, bf16[4,64]{1,0}) tuple(%write, %taken)
}

ENTRY %main (p: bf16[8,64], q: bf16[1,64], i: s32[], table: bf16[512,64]) -> bf16[8,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %q = bf16[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %table = bf16[512,64]{1,0} parameter(3)
  %near = (bf16[1,64]{1,0:S(1)}, bf16[1,64]{1,0}, u32[]{:S(2)}) copy-start(%q)
  %part = ((bf16[512,64]{1,0}), bf16[2,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%table), slice={[0:2], [0:64]}
  %f = (bf16[8,64]{1,0}, bf16[4,64]{1,0}) fusion(%p, %q, %i, %table), kind=kLoop, calls=%fused
  %again = bf16[64]{0} bitcast(%q)
  ROOT %kernel = bf16[8,64]{1,0} custom-call(%p, %q, %again), output_to_operand_aliasing={{}: (0, {})}, x=1
}
"""


def test_kernels_of_a_program():
    assert programs.counts_of_loop(_PROGRAM).kernels == 1 + 5 + 2 + 1  # call, loop, branch, fusion
    assert programs.counts_of_program(_PROGRAM).kernels == 9 + 1
    assert programs.trips_of_loop(_PROGRAM) is None
    known = 'body=%body.2, backend_config={"known_trip_count":{"n":"16"}}'
    assert programs.trips_of_loop(_PROGRAM.replace("body=%body.2", known)) == 16
    assert programs.counts_of_loop("") is programs.counts_of_program("") is None


def test_bytes_of_a_program():
    """Of a kernel, a loop of five turns and a branch of two: what they read and write, 8 bytes an array."""
    mosaic, turns, branch, last = 8 + 32 + 8, 5 * 16, 2 * 16, 8 + 4 + 8
    assert programs.counts_of_loop(_PROGRAM).bytes == mosaic + turns + branch + last


def test_what_is_written_in_place_and_read_in_part():
    row = 64 * 2
    in_place = (row + 4) + row + (4 + 4) * row  # reads a row and its place, writes it; takes four rows
    near, part, kernel = row, 2 * row, row  # to the core's memory; a kernel that changes its first operand
    assert programs.counts_of_program(_IN_PLACE).bytes == in_place + near + part + kernel
    attention = _IN_PLACE.replace("x=1", 'metadata={op_name="jit(f)/tree_attention/mpmd_map"}')
    assert programs.counts_of_program(attention).bytes == in_place + near + part + 8 * row + kernel  # all
