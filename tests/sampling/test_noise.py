"""The noise field: the published cipher, the same bits everywhere, Gumbel in distribution, nothing shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rljax.sampling import noise

REQUESTS, POSITIONS, VOCAB = 64, 32, 64


@pytest.fixture(scope="module")
def field():
    """Noise as a run meets it, float64 [requests, positions, tokens]."""
    keys = np.stack([noise.request_key(0, 0, 0, i // 8, i % 8) for i in range(REQUESTS)])
    keys = np.broadcast_to(keys[:, None], (REQUESTS, POSITIONS, 2))
    positions = np.broadcast_to(np.arange(POSITIONS, dtype=np.int32), (REQUESTS, POSITIONS))
    tokens = np.broadcast_to(np.arange(VOCAB, dtype=np.uint32), (REQUESTS, POSITIONS, VOCAB))
    values = jax.jit(noise.gumbel)(keys, positions, tokens)
    return np.asarray(values, np.float64)


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_has_the_published_known_answers(module, key, counter, expected):
    words = [module.asarray(np.array([word], np.uint32)) for word in (*key, *counter)]
    assert tuple(int(word[0]) for word in noise.threefry2x32(*words)) == expected


def test_numpy_and_jax_give_the_same_bits():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (40, 2), dtype=np.uint32)
    positions = rng.integers(0, 40_000, 40, dtype=np.int32)
    tokens = rng.integers(0, 2**18, (40, 30), dtype=np.int32)
    on_host = noise.token_bits(keys, positions, tokens)
    arrays = [jnp.asarray(x) for x in (keys, positions, tokens)]
    assert on_host.dtype == np.uint32
    np.testing.assert_array_equal(noise.token_bits(*arrays), on_host)
    np.testing.assert_array_equal(jax.jit(noise.token_bits)(*arrays), on_host)


def test_every_part_of_the_identity_gives_another_key():
    identities = [
        *((seed, step, prompt, sample) for seed in (0, 1) for step in (0, 1) for prompt in (0, 1, 2)
          for sample in (0, 1)),
        (0,), (1,), (0, 1), (1, 0), (0, 1, 0), (0, 0), (0, 0, 0),  # (1,) is not (1, 0) cut short
        (2**32, 1), (0, 2**32), (0, 2**32 + 1), (2**63, 2**63),  # both words count
    ]  # fmt: skip
    keys = {tuple(noise.request_key(*identity).tolist()) for identity in identities}
    assert len(keys) == len(set(identities))
    np.testing.assert_array_equal(noise.request_key(3, 1, 4), noise.request_key(3, 1, 4))
    with pytest.raises(ValueError, match="negative"):
        noise.request_key(0, -1)


def test_another_seed_request_position_or_token_is_other_noise():
    def bits(seed=0, sample=0, position=7, first=0):
        key = noise.request_key(seed, 0, 5, 2, sample)
        tokens = np.arange(first, first + 256, dtype=np.uint32)
        return noise.token_bits(key[None], np.array([position]), tokens[None])[0]

    reference = bits()
    for other in (bits(seed=1), bits(sample=1), bits(position=8)):
        assert np.sum(other == reference) == 0
    assert len(np.unique(reference)) == 256
    np.testing.assert_array_equal(bits(first=100)[:100], reference[100:200])  # no neighbour has a say


def test_noise_is_standard_gumbel(field):
    gumbel = stats.gumbel_r()
    assert stats.kstest(field.ravel(), gumbel.cdf).pvalue > 1e-3
    assert stats.kstest(field.ravel() * 1.03, gumbel.cdf).pvalue < 1e-6  # the test can tell


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["requests", "positions", "tokens"])
def test_the_largest_along_each_axis_is_as_independence_has_it(field, axis):
    """The largest of n independent ones is Gumbel again, shifted by log n."""
    largest = field.max(axis=axis).ravel() - np.log(field.shape[axis])
    assert stats.kstest(largest, stats.gumbel_r().cdf).pvalue > 1e-3


def test_the_extreme_words_give_finite_noise_in_the_stated_range(monkeypatch):
    words = np.array([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    monkeypatch.setattr(noise, "token_bits", lambda keys, positions, tokens: jnp.asarray(words))
    values = np.asarray(noise.gumbel(None, None, None), np.float64)
    u = np.minimum((words >> 1) * 2.0**-31 + 2.0**-33, 1 - 2.0**-24)
    np.testing.assert_allclose(values, -np.log(-np.log1p(-u)), rtol=1e-6, atol=1e-6)
    assert values.max() < 22.9 and values.min() > -2.9
