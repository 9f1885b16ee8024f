"""Several drafters' trees as one: `python scripts/bench_mixed_tree.py [--quick] [--only SECTIONS]`.

`merge`: microseconds to merge the trees of a batch, against the definition in Python dictionaries of paths.

`worth`: how well the acceptance of nodes proposed by several drafters is predicted, if the drafters have
independent knowledge, if one of them has it all, and if all have the same. The sampled token depends on three
features. Each drafter sees one of them and predicts the exact conditional distribution, so it is calibrated.
"""

import sys
from collections.abc import Callable

import numpy as np

from drafters.base import Drafts
from drafters.mixed import Agreement, Mixture, mix
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, paired

DRAFTERS = 3
FEATURES, VOCABULARY, SPREAD = 12, 24, 2.5  # values of a feature; tokens; standard deviation of the logits
_CALLS = 100  # of our implementation in a timed round, since one call is too short to time
CANDIDATES, BUDGET = 3, 2  # tokens proposed by a drafter; nodes that are verified

# --- merging ---------------------------------------------------------------------------------------------


def random_drafts(
    rng: np.random.Generator, queries: int, nodes: int, tokens: int
) -> tuple[Drafts, np.ndarray]:
    """Returns random trees, whose nodes have random earlier nodes as parents, and the nodes'
    probabilities.
    """
    parents = np.asarray(
        [[rng.integers(-1, node) if node else -1 for node in range(nodes)] for _ in range(queries)]
    )
    likely = rng.uniform(0.5, 1.0, (queries, nodes))
    for node in range(1, nodes):
        above = parents[:, node]
        likely[:, node] *= np.where(above >= 0, likely[np.arange(queries), above], 1.0)
    drafts = Drafts(
        rng.integers(0, tokens, (queries, nodes)).astype(np.int32),
        parents.astype(np.int32),
        np.log(likely).astype(np.float32),
        np.full(queries, nodes, np.int32),
    )
    return drafts, likely


def merged_in_python(
    proposals: list[Drafts], probabilities: list[np.ndarray], query: int, nodes: int
) -> list:
    """Returns the likeliest paths of a query, under the assumption that drafters are independent."""
    total: dict[tuple, float] = {(): 1.0}
    by_path: dict[tuple, dict[int, float]] = {(): dict.fromkeys(range(len(proposals)), 1.0)}
    for drafter, drafts in enumerate(proposals):
        paths = []
        for node in range(drafts.counts[query]):
            parent = drafts.parents[query, node]
            path = (*(paths[parent] if parent >= 0 else ()), drafts.tokens[query, node])
            paths.append(path)
            by_drafter = by_path.setdefault(path, {})
            by_drafter[drafter] = max(by_drafter.get(drafter, 0.0), probabilities[drafter][query, node])
    for path in sorted(by_path, key=len)[1:]:
        missed = 1.0
        for drafter, by_drafter in by_path[path].items():
            missed *= 1.0 - by_drafter / by_path[path[:-1]][drafter]
        total[path] = total[path[:-1]] * (1.0 - missed)
    return sorted(total, key=total.get, reverse=True)[1 : nodes + 1]


def merge_rows(queries: int, nodes: int, repeats: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for case, tokens in (("paths meet", 3), ("few paths meet", 1000)):
        proposals, probabilities = map(
            list, zip(*(random_drafts(rng, queries, nodes, tokens) for _ in range(DRAFTERS)), strict=True)
        )
        budgets, independent = np.full(queries, nodes), np.ones(1 << DRAFTERS)

        def ours(args: tuple = (proposals, probabilities, budgets, nodes, independent)) -> None:
            for _ in range(_CALLS):
                mix(*args)

        def baseline(args: tuple = (proposals, probabilities)) -> None:
            for query in range(queries):
                merged_in_python(*args, query, nodes)

        compared = paired(ours, baseline, repeats)
        rows.append(
            Row(
                name=f"merge/{queries} queries, {DRAFTERS} x {nodes} nodes/{case}",
                value=1e6 * compared.seconds / _CALLS,
                unit="us",
                baseline="dictionaries in Python",
                baseline_value=1e6 * compared.baseline_seconds,
                ratio=compared.ratio * _CALLS,
                details={"rounds": repeats},
            )
        )
    return rows


# --- what agreement is worth -----------------------------------------------------------------------------


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
        rows += [
            Row(
                name=f"worth/{kind}/squared error against {name}",
                value=errors["learned"],
                unit="squared error",
                baseline=name,
                baseline_value=errors[name],
                ratio=errors[name] / errors["learned"],
                details=details
                | {
                    "predicted": float(predicted["learned"].mean()),
                    "baseline_predicted": float(predicted[name].mean()),
                },
            )
            for name in ("max", "noisy or")
        ]
        best = max(taken[f"drafter {i}"] for i in range(DRAFTERS))
        rows.append(
            Row(
                name=f"worth/{kind}/accepted of {BUDGET} nodes",
                value=taken["mixed"] / asked,
                unit="nodes",
                baseline="the best drafter alone",
                baseline_value=best / asked,
                ratio=taken["mixed"] / best,
            )
        )
    return rows


def plan(repeats: int, rounds: int) -> list[Measurement]:
    merge: Callable[[], list[Row]] = lambda: merge_rows(8, 31, repeats)  # noqa: E731
    return [
        Measurement("merge", "8 queries", merge),
        Measurement("worth", "three drafters", lambda: worth_rows(rounds, 256), disturbed=False),
    ]


BENCHMARK = Benchmark(
    name="mixed_tree",
    description=__doc__.splitlines()[0],
    plan=plan(repeats=21, rounds=400),
    quick_plan=plan(repeats=3, rounds=40),
    quick_help="few rounds",
    packages=("numba", "numpy"),
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.run(BENCHMARK.parser().parse_args()))
