"""Row-invariance is measured: on this processor, and on ones that misbehave."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import target
from rljax.assembly.decoding import make_numerics, numerics_line, stops_unless_exact
from rljax.config import load_config
from rljax.engine import invariance
from rljax.engine.buckets import Buckets, make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.invariance import RowCounts, measure, measured, row_counts
from rljax.errors import ConfigError
from rljax.kernels.linear import product
from rljax.models.config import ModelConfig
from rljax.numerics.kernel_choice import KernelChoice
from rljax.numerics.products import ProductForm, forms, unmeasured_form
from rljax.numerics.rows import Numerics, row_sum
from tests.engines import SAMPLING, ask, decode, lively_params
from tests.exactness import check_same
from tests.misbehaving_products import every_call, every_count, lone_rows_and_rests, replaced, traced_anew
from tests.training.tiny_run import write_config

POLICY = ModelConfig("qwen3", 96, 64, 1, 4, 2, 64, 96, tie_embeddings=True, qk_norm=True)
BUCKETS = Buckets((2, 18), (64,), (), 3)
COUNTS = RowCounts((2, 6, 18, 33), (2, 18), ((2, 3), (18, 3)))
FEW = RowCounts((2, 48), (2,), ())
ADDED = ProductForm(4, 4)  # the cheapest form without rests of one or two rows
SLABS = ProductForm(64, 64, slabs=True)


@pytest.mark.parametrize(
    ("platform", "most", "size"),
    [("gpu", 8, 64), ("gpu", 100, 128), ("tpu", 256, 256), ("gpu", 512, 256), ("cpu", 512, 64)],
)
def test_a_slab_holds_the_largest_pass_where_rows_are_cheap(platform, most, size):
    with target.tracing_for(jax.devices()[0], 1, platform):
        for dtype in ("float32", "bfloat16"):
            assert forms(dtype, most)[-1] == ProductForm(size, size, slabs=True)


@pytest.mark.parametrize(
    ("dtype", "form", "rows"),
    [
        ("bfloat16", ProductForm(2, 1), 70),
        ("float32", ADDED, 5),
        ("float32", SLABS, 70),
        ("bfloat16", SLABS, 5),
        ("bfloat16", ProductForm(16, 16, float32=True), 70),
    ],
)
def test_a_padded_product_is_the_product(dtype, form, rows):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, np.float32) for shape in ((rows, 32), (24, 32)))
    numerics = Numerics(compute_dtype=dtype, measured_form=form)
    y = product(jnp.asarray(x, dtype), jnp.asarray(weight), numerics)
    assert y.shape == (rows, 24) and y.dtype == jnp.float32
    np.testing.assert_allclose(y, x @ weight.T, atol=1e-5 if dtype == "float32" else 0.2)


def test_row_counts_are_those_of_the_engine():
    counts = row_counts(make_buckets(8, 200, True, verify_buckets=(16, 32), max_drafts=7), [1024, 1000])
    assert counts.slots == (2, 4, 8)
    assert {2, 4, 8, 16, 32, 256, 256 + 1000 % 256} <= set(counts.products)
    assert max(counts.products) <= 512
    assert counts.passes == ((2, 7), (4, 7), (8, 3), (8, 7))
    assert counts.most == 32


def test_a_processor_with_lone_rows_and_rests_gets_padding(monkeypatch):
    monkeypatch.setattr(invariance, "_form_of_sums", None)  # a CPU tries no plain sums
    with replaced(lone_rows_and_rests):
        found = measure(POLICY, Numerics(), COUNTS)
    said = found.summary("float32")
    if not found.exact:  # by a fault of its own
        pytest.skip(said)
    assert found.form.multiple >= 4 and not found.form.plain_sums
    assert "rows has other bits" in found.rejected[0]
    assert "multiples of" in said and found.fingerprint in said


def decoded(form):
    """What two requests get in 2 and in 18 slots."""
    numerics = Numerics(measured_form=form)
    engine = DecodeEngine(POLICY, numerics, SAMPLING, BUCKETS, [], decode_steps_per_sync=64)
    params, asked = engine.load_params(lively_params(POLICY)), ask([3, 17], [30, 20])
    return [decode(engine, params, asked, order=[slots - 1, 0]) for slots in BUCKETS.batch]


def test_padding_makes_decoding_exact_on_such_a_processor():
    with replaced(lone_rows_and_rests):
        few, many = decoded(ADDED)
        assert few == many
        few, many = decoded(ProductForm(2, 1))
        assert few != many  # as good as alone, and a rest of two


def test_a_processor_with_a_kernel_for_every_number_of_rows_gets_slabs():
    with replaced(every_count):
        found = measure(POLICY, Numerics(), COUNTS)
    assert found.exact and found.form == SLABS
    assert len(found.rejected) == len(forms("float32")) - 1
    assert "products of 64 rows at a time (" in found.summary("float32")


def ordered_sum(x, axis=None, keepdims=False):
    """A plain reduction that always adds in the same order, as an accelerator's may."""
    if axis != -1:
        return x.sum(axis, keepdims=keepdims)
    return row_sum(x, Numerics(), ordered=True)


def sum_by_count(x, axis=None, keepdims=False):
    """A plain reduction with other bits for every number of rows."""
    total = ordered_sum(x, axis, keepdims)
    return total if axis != -1 else total * (1 + 2**-12 * x.shape[0])


def sum_beside_a_gradient(x, axis=None, keepdims=False):
    """A plain reduction with other bits where its gradient is taken."""
    exact = jax.custom_vjp(lambda x: ordered_sum(x, axis, keepdims))
    exact.defvjp(
        lambda x: (ordered_sum(x, axis, keepdims) * (1 + 2**-12), x.shape),
        lambda shape, gradient: (jnp.broadcast_to(gradient, shape),),
    )
    return exact(x)


@pytest.mark.default_cases("ordered_sum-*", "sum_by_count-*")
@pytest.mark.parametrize(
    ("reduction", "refused"),
    [
        (ordered_sum, None),
        (sum_by_count, "plain sums: a sum over 64 entries in 2, 6, 18, 33 rows has other bits than in 576"),
        (sum_beside_a_gradient, "plain sums: the logits of a layer of 64 in 33 rows have other bits beside"),
    ],
)
def test_an_accelerator_has_plain_sums_where_they_are_exact(reduction, refused, monkeypatch):
    numerics = Numerics(kernels=KernelChoice(tree_attention="xla"))
    with target.tracing_for(jax.devices()[0], 1, "gpu"), monkeypatch.context() as patch:
        patch.setattr("rljax.numerics.rows.jnp.sum", reduction)
        with traced_anew():
            found = measure(POLICY, numerics, COUNTS)
    assert found.form.plain_sums is (refused is None)
    assert (", plain sums" in found.summary("float32")) is (refused is None)
    if refused is not None:
        assert found.rejected[-1].startswith(refused)
    else:
        assert not any("sum" in each for each in (*found.rejected, *found.failures))


def test_a_processor_on_which_nothing_is_exact_is_refused(tmp_path):
    with replaced(every_call):
        config = load_config(write_config(tmp_path))
        with pytest.raises(ConfigError, match=r"engine.row_invariant: .* product .* other bits .* set warn"):
            make_numerics(config, POLICY, None)
        config = load_config(write_config(tmp_path), ["engine.row_invariant=warn"])
        numerics, found = make_numerics(config, POLICY, None)
        assert not found.exact and len(found.rejected) == len(forms("float32"))
        assert found.form == unmeasured_form("float32")
        said = numerics_line(config, found)
        assert numerics.row_invariant and "not exact in float32" in said
        assert said.endswith("training counts the tokens that differ (mismatch/tokens)")


@pytest.mark.parametrize(
    ("setting", "platform", "stops"),
    [
        ("auto", "cpu", True),
        ("auto", "gpu", False),
        ("auto", "tpu", False),
        (True, "gpu", True),
        ("warn", "cpu", False),
    ],
)
def test_where_nothing_is_exact_accelerators_go_on(setting, platform, stops):
    assert stops_unless_exact(setting, platform) is stops


def test_tests_count_flips_on_accelerators_and_demand_all_bits_on_a_cpu():
    plain = [([1, 2, 3] * 20, [-0.5] * 60)] * 3
    flipped = [([1, 2, 3] * 10 + [9] * 30, [-0.51] * 30 + [-7.0] * 30), *plain[1:]]
    check_same(plain, plain, platform="cpu")
    check_same(flipped, plain, platform="gpu")
    for outputs, platform in ((flipped, "cpu"), ([([1, 2, 4], [-0.5] * 3)] * 3, "gpu")):
        with pytest.raises(AssertionError):
            check_same(outputs, plain, platform=platform)
    with pytest.raises(AssertionError):  # before the flip
        check_same([([1, 2, 3] * 20, [-0.7] * 60), *plain[1:]], plain, platform="gpu")


def test_row_invariance_that_is_off_is_not_measured(tmp_path, monkeypatch):
    for name in ("_product_failures", "_sum_failures", "_attention_failures", "_tiny_policy"):
        monkeypatch.setattr(invariance, name, None)
    config = load_config(write_config(tmp_path), ["engine.row_invariant=false"])
    numerics, found = make_numerics(config, POLICY, None)
    assert found is None and not numerics.row_invariant


def test_a_measurement_is_kept_until_it_is_damaged(tmp_path, monkeypatch):
    arguments = POLICY, Numerics(), FEW, tmp_path
    first = measured(*arguments)
    calls = []

    def measured_again(*_):
        calls.append(_)
        return dataclasses.replace(first, seconds=0.0)

    monkeypatch.setattr(invariance, "_measured", measured_again)
    assert measured(*arguments) == first and not calls
    measured(POLICY, Numerics(compute_dtype="bfloat16"), *arguments[2:])
    assert len(calls) == 1
    for file in (tmp_path / "numerics").iterdir():
        file.write_bytes(b'{"form"')
    assert measured(*arguments).seconds == 0.0 and len(calls) == 2


def test_a_fingerprint_is_of_the_numerics_alone():
    def fingerprint(policy=POLICY, numerics=Numerics()):  # noqa: B008 (frozen)
        return measured(policy, numerics, FEW, None).fingerprint

    one = fingerprint()
    assert one == fingerprint(dataclasses.replace(POLICY, mlp_size=128))
    assert one != fingerprint(numerics=Numerics(compute_dtype="bfloat16"))
    with replaced(every_call):
        assert one != fingerprint()
