"""Several drafters' trees as one: `python scripts/bench_mixed_tree.py [--quick]`.

`worth`: how well the acceptance of nodes proposed by several drafters is predicted, if the drafters have
independent knowledge, if one of them has it all, and if all have the same. The sampled token depends on three
features. Each drafter sees one of them and predicts the exact conditional distribution, so it is calibrated.
"""

import sys

import numpy as np

from drafters.base import Drafts
from drafters.mixed import Agreement, Mixture, mix
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row

DRAFTERS = 3
FEATURES, VOCABULARY, SPREAD = 12, 24, 2.5  # values of a feature; tokens; standard deviation of the logits
CANDIDATES, BUDGET = 3, 2  # tokens proposed by a drafter; nodes that are verified


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def world(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sampling distributions given the three features, [F, F, F, V], and each drafter's
    predictions, [3, F, F, F, V].
    """
    logits = SPREAD * rng.normal(size=(DRAFTERS, FEATURES, VOCABULARY))
    views = [logits[0][:, None, None], logits[1][None, :, None], logits[2][None, None, :]]
    if kind == "independent":
        sampled = softmax(views[0] + views[1] + views[2])
    elif kind == "one knows":
        knows = softmax(4 * rng.normal(size=(FEATURES, FEATURES, FEATURES, DRAFTERS)))
        sampled = sum(knows[..., i, None] * softmax(views[i]) for i in range(DRAFTERS))
    else:  # all see the first feature
        sampled = np.broadcast_to(softmax(views[0]), (FEATURES,) * 3 + (VOCABULARY,))
    seen = [(1, 2), (0, 2), (0, 1)] if kind != "the same" else [(1, 2)] * 3
    said = [np.broadcast_to(sampled.mean(axis=hidden, keepdims=True), sampled.shape) for hidden in seen]
    return sampled, np.stack(said)


def proposals_of(predictions: np.ndarray) -> tuple[list[Drafts], list[np.ndarray]]:
    """Returns drafts of the likeliest tokens of each drafter, from its predictions [3, n, V]."""
    queries = predictions.shape[1]
    drafts, probabilities = [], []
    for prediction in predictions:
        tokens = np.argsort(-prediction, axis=1)[:, :CANDIDATES].astype(np.int32)
        likely = np.take_along_axis(prediction, tokens, axis=1)
        counts = np.full(queries, CANDIDATES, np.int32)
        drafts.append(Drafts(tokens, np.full_like(tokens, -1), np.log(likely).astype(np.float32), counts))
        probabilities.append(likely)
    return drafts, probabilities


def worth_rows(rounds: int, queries: int) -> list[Row]:
    rows = []
    for kind in ("independent", "one knows", "the same"):
        rng = np.random.default_rng(0)
        sampled, said = world(kind, rng)
        agreement = Agreement(DRAFTERS)
        several, right, predictions = [], [], {"learned": [], "max": [], "noisy or": []}
        taken = {"mixed": 0, **{f"drafter {i}": 0 for i in range(DRAFTERS)}}
        for number in range(rounds):
            at = tuple(rng.integers(FEATURES, size=(3, queries)))
            cumulative = np.cumsum(sampled[at], axis=1)
            token = (rng.random((queries, 1)) * cumulative[:, -1:] > cumulative).sum(axis=1)
            drafts, probabilities = proposals_of(said[(slice(None), *at)])

            def mixed(
                nodes: int, independence: np.ndarray, given: tuple = (drafts, probabilities)
            ) -> Mixture:
                return mix(*given, np.full(queries, nodes), nodes, independence)

            mixture = mixed(DRAFTERS * CANDIDATES, agreement.independence)
            judged = mixture.origins > 0
            accepted = judged & (mixture.drafts.tokens == token[:, None])
            if number >= rounds // 2:  # the mixture has learned by then
                agreed = judged & (mixture.origins & (mixture.origins - 1) != 0)
                several.append(agreed.sum())
                right.append(accepted[agreed])
                predictions["learned"].append(mixture.probability[agreed])
                predictions["max"].append(mixture.strongest[agreed])
                predictions["noisy or"].append(mixture.pooled[agreed])
                first = mixture.drafts.tokens[:, :BUDGET] == token[:, None]
                taken["mixed"] += int((first & judged[:, :BUDGET]).sum())
                for i in range(DRAFTERS):
                    taken[f"drafter {i}"] += int((drafts[i].tokens[:, :BUDGET] == token[:, None]).sum())
            agreement.observe(mixture, judged, accepted)
        was = np.concatenate(right)
        predicted = {name: np.concatenate(values) for name, values in predictions.items()}
        errors = {name: float(((values - was) ** 2).mean()) for name, values in predicted.items()}
        asked = (rounds - rounds // 2) * queries
        details = {
            "nodes": int(sum(several)),
            "accepted": float(was.mean()),
            "independence": agreement.independence[-1],
        }
        for name in ("max", "noisy or"):
            predictions_of = {
                "predicted": float(predicted["learned"].mean()),
                "baseline_predicted": float(predicted[name].mean()),
            }
            row, both = f"worth/{kind}/squared error against {name}", (errors["learned"], errors[name])
            more = details | predictions_of
            rows.append(counted_row(row, *both, "squared error", name, less=True, **more))
        best = max(taken[f"drafter {i}"] for i in range(DRAFTERS))
        row, both = f"worth/{kind}/accepted of {BUDGET} nodes", (taken["mixed"] / asked, best / asked)
        rows.append(counted_row(row, *both, "nodes", "the best drafter alone"))
    return rows


BENCHMARK = Benchmark(
    name="mixed_tree",
    description=__doc__,
    plan=(Measurement("worth", "three drafters", worth_rows, (400, 256), disturbed=False),),
    quick_plan=(Measurement("worth", "three drafters", worth_rows, (40, 256), disturbed=False),),
    quick_help="few rounds",
    packages=("numba", "numpy"),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
