"""Which backend computes an operation, and what is said where none can."""

import dataclasses
import sys
import types
import warnings

import jax
import numpy as np
import pytest

from rljax import target
from rljax.errors import UserError
from rljax.kernels import switch, tuned
from rljax.kernels.compaction import compaction
from rljax.kernels.gated_product import gated_product
from rljax.kernels.head_products import HeadWeights, head_products
from rljax.kernels.noisy_argmax import noisy_argmax
from rljax.kernels.quantized_product import quantized_product
from rljax.kernels.round_to_nearest import round_to_nearest
from rljax.kernels.switch import call
from rljax.kernels.token_logprobs import token_logprobs
from rljax.kernels.tree_attention import decode_attention, tree_attention
from rljax.numerics.kernel_choice import KernelChoice, Refused
from rljax.numerics.rows import Numerics

_OP = "noisy_argmax"


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """Three files of an operation: one that computes, one that refuses, one that also interprets."""

    def refuse(x, interpret=False):
        raise Refused(f"odd numbers such as {x}")

    def file(name, function):
        module = types.ModuleType(f"rljax.kernels.{_OP}.{name}")
        setattr(module, _OP, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    file("base", lambda x: ("xla", x))
    file("mosaic_gpu", refuse)
    file("mosaic_tpu", lambda x, interpret=False: ("tpu", x, interpret))


def test_names_are_tried_in_their_order():
    assert call(_OP, "xla", (1,), 7) == ("xla", 7)
    assert call(_OP, "interpret_tpu", (1,), 7) == ("tpu", 7, True)
    assert call(_OP, ("interpret_gpu", "interpret_tpu", "xla"), (1,), 7) == ("tpu", 7, True)
    with pytest.raises(Refused, match="noisy_argmax: interpret_gpu: odd numbers such as 7"):
        call(_OP, "interpret_gpu", (1,), 7)
    with pytest.raises(Refused, match=r"interpret_gpu: odd numbers such as 7; mosaic_tpu: it runs on TPUs"):
        call(_OP, ("interpret_gpu", "mosaic_tpu"), (1,), 7)
    with pytest.raises(UserError, match="'mosaic_cpu' is no implementation; did you mean 'mosaic_"):
        call(_OP, "mosaic_cpu", (1,), 7)
    with pytest.raises(Refused, match="there is no such kernel for this operation"):
        switch.backend("switch", "xla")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is another device")
@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_tpu"])
def test_kernels_for_other_devices_are_refused(name):
    with pytest.raises(Refused, match=r"it runs on .* not on cpu"):
        call(_OP, name, (1,), 7)


def _device(capability):
    """Context of a GPU that is not there."""
    device = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability=capability)
    return target.tracing_for(device, 1, "gpu")


def test_hopper_has_kernels_where_nothing_was_measured(monkeypatch):
    ops = {field.name for field in dataclasses.fields(KernelChoice)} - {"mesh"}
    with _device("9.0"):
        found = {op for op in ops if tuned.default(op, (9, 64))[1:] == ("xla",)}
        assert tuned.default("packed_attention", (9, 3, 64)) == ("triton", "xla")
        assert found == {op for op in ops if tuned.has_kernel(op)} == ops - {"compaction"}
        assert tuned.default("compaction", (3, 64)) == ("xla",)
        monkeypatch.setattr(tuned, "TUNED", {("NVIDIA H200", _OP): [((4, 0), ("xla",))]})
        assert tuned.default(_OP, (4, 9)) == ("xla",)  # a measurement decides
        assert tuned.default(_OP, (3, 9)) == ("mosaic_gpu", "xla")
    monkeypatch.setattr(tuned, "TUNED", {})
    with _device("8.0"):
        assert {tuned.default(op, (9, 64)) for op in ops} == {("xla",)}


def test_what_a_default_kernel_refuses_is_computed_and_said():
    with _device("9.0"), pytest.warns(UserWarning) as said:
        assert call(_OP, None, (1,), 7) == ("xla", 7)
    (line,) = [str(warning.message) for warning in said]
    assert line == "kernels.noisy_argmax: xla instead of mosaic_gpu: odd numbers such as 7"
    with warnings.catch_warnings(), _device("9.0"):
        warnings.simplefilter("error")
        assert call(_OP, ("mosaic_gpu", "xla"), (1,), 7) == ("xla", 7)  # as was asked


def test_the_default_is_measured_or_xla(monkeypatch):
    assert tuned.default(_OP, (4, 100)) == ("xla",)
    kind = jax.devices()[0].device_kind
    entries = [((1, 50), ("mosaic_gpu", "xla")), ((8, 50), ("mosaic_tpu",))]
    monkeypatch.setattr(tuned, "TUNED", {(kind[:2], _OP): entries})
    assert tuned.default(_OP, (4, 49)) == ("xla",)
    assert tuned.default(_OP, (4, 50)) == ("mosaic_gpu", "xla")
    assert tuned.default(_OP, (8, 50)) == ("mosaic_tpu",)
    assert tuned.default("compaction", (8, 50)) == ("xla",)


def _asked(op, rows, monkeypatch):
    """What an operation over so many rows, slots, nodes and positions asks the default by."""
    questions = []
    monkeypatch.setattr(tuned, "default", lambda op, sizes: questions.append((op, sizes)) or ())
    policy = {"32": 32, "V": 320, "d": 128, "H": 4, "Hk": 2, "D": 64}

    def array(*axes):
        return np.zeros([policy.get(axis, rows) for axis in axes], np.float32)

    hidden, cached = array("R", "T", "d"), array("B", "Hk", "S", "D")
    calls = {
        "noisy_argmax": lambda: noisy_argmax(array("B", "V"), None, None, None, None),
        "token_logprobs": lambda: token_logprobs(hidden, array("V", "d"), array("R", "T"), None, None, 1),
        "tree_attention": lambda: tree_attention(array("B", "M", "H", "D"), None, cached, *[None] * 6),
        "decoding": lambda: decode_attention(array("B", "1", "H", "D"), None, cached, *[None] * 4),
        "quantized_product": lambda: quantized_product(array("N", "d"), array("V", "d")),
        "round_to_nearest": lambda: round_to_nearest(array("V", "d"), 4, 64),
        "head_products": lambda: head_products(
            array("N", "1", "d"),
            array("N", "1", "2", "32"),
            HeadWeights((array("V", "d"),) * 3, (), (), 1e-5),
            False,
            Numerics(),
        ),
        "gated_product": lambda: gated_product(
            array("N", "1", "d"), *[array("V", "d")] * 2, jax.nn.silu, False
        ),
        "compaction": lambda: compaction(None, cached, None, None, array("B", "P"), None, None),
    }
    with pytest.raises(Refused):
        calls[op]()
    return questions


@pytest.mark.parametrize(
    "op",
    [
        "noisy_argmax",
        "token_logprobs",
        "quantized_product",
        "round_to_nearest",
        "compaction",
        "gated_product",
        "head_products",
    ],
)
def test_the_default_is_the_same_for_every_number_of_rows(op, monkeypatch):
    [(name, sizes)] = _asked(op, 3, monkeypatch)
    assert name == op and sizes
    assert _asked(op, 3, monkeypatch) == _asked(op, 64, monkeypatch)


def test_decoding_and_verifying_have_the_same_default(monkeypatch):
    every = [_asked(op, rows, monkeypatch) for op in ("tree_attention", "decoding") for rows in (3, 64)]
    assert every == [[("tree_attention", (4, 2, 64))]] * 4


def test_a_mesh_leaves_xla_where_no_kernel_is_named():
    mesh = jax.make_mesh((1,), ("data",))
    choice = KernelChoice().on_mesh(mesh)
    assert choice == KernelChoice(*["xla"] * 9)
    assert not choice.splits("compaction")
    choice = KernelChoice(noisy_argmax=("mosaic_gpu", "xla"), compaction=("mosaic_gpu", "xla")).on_mesh(mesh)
    assert choice.noisy_argmax == "xla" and choice.tree_attention == "xla"
    assert choice.compaction == ("mosaic_gpu", "xla") and choice.splits("compaction")
    assert not choice.splits("tree_attention")
    with pytest.raises(Refused, match=r"kernels\.noisy_argmax: mosaic_gpu computes on one device"):
        KernelChoice(noisy_argmax="mosaic_gpu").on_mesh(mesh)
