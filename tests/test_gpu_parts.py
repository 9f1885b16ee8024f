"""Functions of the parts of the report on a GPU; `test_gpu_report.py` runs the parts themselves."""

import pytest

from rljax.errors import UserError
from rljax.models.transformer import num_params
from tests.scripts import load_script

carry = load_script("gpu_parts.carry")
engines = load_script("gpu_parts.engines")
SHAPES = load_script("workloads").SHAPES


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
