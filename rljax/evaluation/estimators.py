"""Estimates from n samples per problem: pass@k, maj@k, and confidence intervals of means over problems."""

import functools
import math
from collections.abc import Sequence

import numpy as np

MAX_SAMPLES = 1000
"""Most samples per problem: binomial coefficients of larger numbers overflow a float."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns the probability that at least one of k responses passes, if they are drawn without replacement
    from n = `samples` responses of which c = `passed` pass. It is unbiased for fresh responses (Chen et al.,
    "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, Eq. 1).

        1 - C(n - c, k) / C(n, k) = 1 - prod over i = n - c + 1 .. n of (1 - k / i)

    The product, as in the paper's listing, stays in [0, 1]; the coefficients would overflow.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"no pass@{k} of {samples} samples of which {passed} pass")
    if samples - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def majority_at_k(
    votes: Sequence[int], scores: Sequence[float], silent: int, ks: Sequence[int]
) -> list[float]:
    """Returns the expected score of the most frequent answer among k responses (maj@k, "self-consistency":
    Wang et al., arXiv 2203.11171). The expectation is over all ways to draw k of the n responses without
    replacement, so it is unbiased for fresh responses; k = n is the vote of all n.

    Ties are broken uniformly at random. A draw without any answer scores 0.

    Args:
      votes: number of responses with each answer, at least 1.
      scores: score of each answer: 1 if it is right, else 0.
      silent: number of responses without an answer. n = sum(votes) + silent is at most MAX_SAMPLES.
      ks: numbers of responses to draw, from 1 to n.

    Returns:
      The expected score for each k.
    """
    n = sum(votes) + silent
    if n > MAX_SAMPLES or not all(1 <= k <= n for k in ks):
        raise ValueError(f"no maj@k of {n} samples for k in {list(ks)}; at most {MAX_SAMPLES} samples")
    ordered = sorted(zip(votes, map(float, scores), strict=True))
    return list(_majority(tuple(ordered), silent, tuple(ks)))


@functools.lru_cache(maxsize=4096)  # many problems have the same votes
def _majority(answers: tuple[tuple[int, float], ...], silent: int, ks: tuple[int, ...]) -> tuple[float, ...]:
    """Counts the draws for every winning number of votes, as a product of one polynomial per answer in the
    number of responses drawn. The product also tracks the number of tied winners and the sum of their scores.
    """
    largest = max(ks, default=0)
    # By number of responses drawn: the winner's expected score, summed over all draws.
    won = np.zeros(largest + 1)
    for most in range(1, min(largest, max((count for count, _ in answers), default=0)) + 1):
        ties = min(largest // most, sum(count >= most for count, _ in answers))
        # ways[t, u]: draws of u responses in which t answers have `most` votes and no answer has more.
        # sums[t, u]: the same draws, weighted by the sum of the scores of these t answers.
        ways, sums = np.zeros((ties + 1, largest + 1)), np.zeros((ties + 1, largest + 1))
        ways[0] = [math.comb(silent, u) for u in range(largest + 1)]
        for count, score in answers:
            fewer = [float(math.comb(count, drawn)) for drawn in range(min(count, most - 1) + 1)]
            next_ways, next_sums = _times(ways, fewer), _times(sums, fewer)
            if count >= most:  # this answer may join the tied winners
                coefficient, left = float(math.comb(count, most)), largest + 1 - most
                next_ways[1:, most:] += coefficient * ways[:-1, :left]
                next_sums[1:, most:] += coefficient * (sums[:-1, :left] + score * ways[:-1, :left])
            ways, sums = next_ways, next_sums
        won += (sums[1:] / np.arange(1, ties + 1)[:, None]).sum(axis=0)
    n = silent + sum(count for count, _ in answers)
    return tuple(float(won[k] / math.comb(n, k)) for k in ks)


def _times(polynomials: np.ndarray, factor: list[float]) -> np.ndarray:
    """Multiplies polynomials, the rows of [T, U], by one factor; drops the powers from U on."""
    powers = polynomials.shape[1]
    if len(factor) > len(polynomials):
        return np.stack([np.convolve(row, factor)[:powers] for row in polynomials])
    product = np.zeros_like(polynomials)
    for power, coefficient in enumerate(factor[:powers]):
        product[:, power:] += coefficient * polynomials[:, : powers - power]
    return product


def bootstrap_interval(
    values: np.ndarray, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns percentile bootstrap intervals of means over problems (Efron and Tibshirani, "An Introduction
    to the Bootstrap", 1993, chapter 13).

    Problems are resampled with all their responses: the variance between problems nearly always dominates.
    The same values give the same interval.

    Args:
      values: [P, M], M metrics of P problems.
      confidence: confidence level of the interval, below 1.
      resamples: number of sets of P problems to draw.
      seed: seed of the draws.

    Returns:
      Lower and upper ends, each [M]; None for fewer than two problems, where no interval exists.
    """
    problems = len(values)
    if problems < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    for i in range(resamples):
        means[i] = values[rng.integers(problems, size=problems)].mean(axis=0)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(means, [tail, 100.0 - tail], axis=0)
    return low, high
