"""The entropy's gradient, where it is asked for: against float64, under filters, and refused by kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.kernels.token_logprobs import mosaic_gpu, mosaic_tpu, token_logprobs
from rljax.numerics.kernel_choice import Refused
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams

RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(2, 5, 8)), jnp.float32)
LM_HEAD = jnp.asarray(RNG.normal(size=(11, 8)), jnp.float32)
TARGETS = jnp.zeros((2, 5), jnp.int32)
GRADIENT = jnp.asarray(RNG.normal(size=(2, 5)), jnp.float32)


def run(sampling, chunk=1024, entropy_gradient=True):
    """The entropies, and the gradients of their weighted sum."""
    options = {"implementation": "xla", "entropy_gradient": entropy_gradient}

    def weighted(hidden, lm_head):
        args = hidden, lm_head, TARGETS, sampling, Numerics(), chunk
        entropies = token_logprobs(*args, **options)[1]
        return jnp.sum(GRADIENT * entropies), entropies

    (_, entropies), gradients = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(HIDDEN, LM_HEAD)
    return entropies, gradients


@pytest.mark.parametrize("chunk", [1024, 4], ids=["whole", "in chunks"])
@pytest.mark.parametrize("sampling", [SamplingParams(0.7), SamplingParams(top_k=3)], ids=["all", "top 3"])
def test_against_float64(sampling, chunk):
    """d H / d x[v] = -p[v] (log p[v] + H), over what the filter keeps."""
    h, w = np.asarray(HIDDEN, np.float64).reshape(-1, 8), np.asarray(LM_HEAD, np.float64)
    x = h @ w.T / sampling.temperature
    if sampling.top_k:
        x = np.where(x >= np.sort(x)[:, -sampling.top_k, None], x, -np.inf)
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    log_p = np.log(np.where(p > 0, p, 1.0))
    entropy = -np.sum(p * log_p, axis=1)
    errors = -p * (log_p + entropy[:, None]) * np.asarray(GRADIENT).reshape(-1, 1) / sampling.temperature
    entropies, (d_hidden, d_lm_head) = run(sampling, chunk)
    np.testing.assert_allclose(entropies.reshape(-1), entropy, rtol=1e-5)
    np.testing.assert_allclose(d_hidden.reshape(-1, 8), errors @ w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_lm_head, errors.T @ h, rtol=1e-4, atol=1e-5)


def test_nothing_unless_it_is_asked_for():
    with_gradient, _ = run(SamplingParams())
    without, gradients = run(SamplingParams(), entropy_gradient=False)
    np.testing.assert_array_equal(with_gradient, without)
    assert all(np.all(np.asarray(each) == 0) for each in gradients)


@pytest.mark.parametrize("kernel", [mosaic_gpu, mosaic_tpu], ids=["GPU", "TPU"])
def test_kernels_refuse(kernel):
    args = (HIDDEN, LM_HEAD, TARGETS, SamplingParams(), Numerics(), 64, None)
    with pytest.raises(Refused, match=r"algorithm\.entropy_coefficient"):
        kernel.token_logprobs(*args, entropy_gradient=True)
