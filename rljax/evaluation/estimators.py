"""Estimates from n samples a problem: pass@k, maj@k, and how sure the mean over problems is."""

import functools
import math
from collections.abc import Sequence

import numpy as np

MAX_SAMPLES = 1000
"""Samples a problem that the estimators take: binomial coefficients of more are no floating-point numbers."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that at least one of k responses passes, drawn without replacement from `samples` of
    which `passed` do: unbiased for fresh responses (Chen et al., "Evaluating Large Language Models Trained on
    Code", arXiv 2107.03374, Eq. 1).

        1 - C(n - c, k) / C(n, k) = 1 - prod over i = n - c + 1 .. n of (1 - k / i)

    The product, as in their listing, never leaves [0, 1], where the coefficients would overflow.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"no pass@{k} of {samples} samples of which {passed} pass")
    if samples - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


def majority_at_k(
    votes: Sequence[int], scores: Sequence[float], silent: int, ks: Sequence[int]
) -> list[float]:
    """The expected score of the answer that most of k responses give (maj@k, "self-consistency": Wang et al.,
    arXiv 2203.11171): over every way to draw k of the n responses without replacement, so unbiased for fresh
    ones, and with k = n the plain vote of all.

    Of answers with equally many votes each is taken as often. Where no response gives an answer the score is
    0.

    Args:
      votes: number of responses with each answer, at least 1.
      scores: score of each answer: 1 if it is right, else 0.
      silent: responses that give none; with the votes n in all, at most MAX_SAMPLES.
      ks: responses drawn, each from 1 to n.

    Returns:
      The expectation for each k.
    """
    n = sum(votes) + silent
    if n > MAX_SAMPLES or not all(1 <= k <= n for k in ks):
        raise ValueError(f"no maj@k of {n} samples for k in {list(ks)}; at most {MAX_SAMPLES} samples")
    ordered = sorted(zip(votes, map(float, scores), strict=True))
    return list(_majority(tuple(ordered), silent, tuple(ks)))


@functools.lru_cache(maxsize=4096)  # many problems have the same votes
def _majority(answers: tuple[tuple[int, float], ...], silent: int, ks: tuple[int, ...]) -> tuple[float, ...]:
    """Counts, for every number of votes that wins, the ways to draw: a product of polynomials in the number
    drawn, one an answer, that also keeps how many answers tie for the win and the sum of their scores.
    """
    largest = max(ks, default=0)
    won = np.zeros(largest + 1)  # by responses drawn: the sum over all ways of the winner's expected score
    for most in range(1, min(largest, max((count for count, _ in answers), default=0)) + 1):
        ties = min(largest // most, sum(count >= most for count, _ in answers))
        # [t, u]: ways to draw u responses so that t answers have `most` votes and none more; in `sums`, each
        # way counts as often as the scores of these t answers add up to.
        ways, sums = np.zeros((ties + 1, largest + 1)), np.zeros((ties + 1, largest + 1))
        ways[0] = [math.comb(silent, u) for u in range(largest + 1)]
        for count, score in answers:
            fewer = [float(math.comb(count, drawn)) for drawn in range(min(count, most - 1) + 1)]
            next_ways, next_sums = _times(ways, fewer), _times(sums, fewer)
            if count >= most:  # this answer ties with those before it
                coefficient, left = float(math.comb(count, most)), largest + 1 - most
                next_ways[1:, most:] += coefficient * ways[:-1, :left]
                next_sums[1:, most:] += coefficient * (sums[:-1, :left] + score * ways[:-1, :left])
            ways, sums = next_ways, next_sums
        won += (sums[1:] / np.arange(1, ties + 1)[:, None]).sum(axis=0)
    n = silent + sum(count for count, _ in answers)
    return tuple(float(won[k] / math.comb(n, k)) for k in ks)


def _times(polynomials: np.ndarray, factor: list[float]) -> np.ndarray:
    """Polynomials, [T, U] with a row each, times one factor, without the powers from U on."""
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
    """Percentile bootstrap intervals of means over problems (Efron and Tibshirani, "An Introduction to the
    Bootstrap", 1993, chapter 13).

    Problems are drawn anew, with all their samples: what varies between problems is nearly always the larger
    part. The same values give the same interval.

    Args:
      values: [P, M], M metrics of P problems.
      confidence: confidence level of the interval, below 1.
      resamples: number of sets of P problems to draw.
      seed: seed of the draws.

    Returns:
      Lower and upper ends, each [M]; None for fewer than two problems, which say nothing about others.
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
