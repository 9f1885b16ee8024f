"""The history drafters' automata: `python scripts/bench_suffix_cache.py [--only SECTIONS]`.

Microseconds per token inserted and per query and bytes per token, against the C++ suffix tree of
arctic-inference on the same traces, both sides in one process and in alternation. arctic-inference builds
from source (`pip install arctic-inference`; the build needs CMake, a C++ compiler, nanobind and PyTorch).
Without it, its rows hold only our values.
"""

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from drafters.base import DraftRequest, Outcome
from drafters.registry import make_drafter
from drafters.suffix_automaton import Proposals, SuffixForest
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row, timed_row
from rljax.timing import compare

try:
    from arctic_inference.suffix_decoding._C import SuffixTree
except ImportError:
    SuffixTree = None

DEPTH = 64  # of arctic's trees, and the longest match of ours
BUDGET = 16  # draft tokens
LEAST_PROBABILITY = 0.1  # of a path: arctic's default
TOKENS_PER_STEP = 4  # between two queries of a response
VOCABULARY = 32_000
TREE = "arctic-inference's C++ tree"
MISSING = "not measured: arctic-inference is not installed"

# --- traces ----------------------------------------------------------------------------------------------


def rl_like_responses(seed: int, count: int, length: int) -> np.ndarray:
    """Responses to one prompt that share long stretches, int32 [count, length].

    A response is put together from stretches: most are copied from a random place of one before it (40 tokens
    on average), the rest is new (20 tokens on average, of Zipf's frequencies).
    """
    rng = np.random.default_rng(seed)
    responses = np.empty((count, length), np.int32)
    for i in range(count):
        filled = 0
        while filled < length:
            if i > 0 and rng.random() < 0.85:
                start = rng.integers(length)
                stretch = responses[rng.integers(i), start : start + rng.geometric(1 / 40)]
            else:
                stretch = np.minimum(rng.zipf(1.3, rng.geometric(1 / 20)), VOCABULARY) - 1
            stretch = stretch[: length - filled]
            responses[i, filled : filled + len(stretch)] = stretch
            filled += len(stretch)
    return responses


# --- both sides ------------------------------------------------------------------------------------------


def insert_whole(groups: Sequence[np.ndarray]) -> SuffixForest:
    """A forest of one automaton a prompt; groups [responses, T] are inserted one after the other."""
    forest = SuffixForest(DEPTH)
    for responses in groups:
        sequences = forest.start(np.full(len(responses), forest.add_root(), np.int32))
        forest.extend(sequences, responses, np.full(len(responses), responses.shape[1], np.int32))
    return forest


def insert_stepwise(responses: np.ndarray) -> SuffixForest:
    """Inserts one token of every response per call, as in sampling."""
    forest = SuffixForest(DEPTH)
    sequences = forest.start(np.full(len(responses), forest.add_root(), np.int32))
    ones = np.ones(len(responses), np.int32)
    for position in range(responses.shape[1]):
        forest.extend(sequences, responses[:, position : position + 1], ones)
    return forest


def arctic_trees(groups: Sequence[np.ndarray], stepwise: bool = False) -> list["SuffixTree"]:
    """Fills arctic's C++ trees directly, one per prompt."""
    trees = []
    for responses in groups:
        tree = SuffixTree(DEPTH)
        for positions in _steps(responses, stepwise):
            for request, response in enumerate(responses):
                tree.extend_ndarray(request, response[positions])
        trees.append(tree)
    return trees


def _steps(responses: np.ndarray, stepwise: bool) -> list[slice]:
    length = responses.shape[1]
    return [slice(i, i + 1) for i in range(length)] if stepwise else [slice(0, length)]


@dataclasses.dataclass
class Queries:
    """Queries for all implementations: drafts for held-out responses, every few tokens.

    Attributes:
      responses: int32 [B, T].
      positions: first positions of the drafts.
    """

    responses: np.ndarray
    positions: range

    @classmethod
    def along(cls, responses: np.ndarray) -> "Queries":
        return cls(responses, range(TOKENS_PER_STEP, responses.shape[1] - BUDGET, TOKENS_PER_STEP))

    def __len__(self) -> int:
        return len(self.responses) * len(self.positions)

    def ask_ours(self, forest: SuffixForest, tree: bool) -> list[Proposals]:
        """Asks our forest. This includes following the responses, since arctic matches the context per
        query.
        """
        batch = len(self.responses)
        sequences = forest.track(np.zeros(batch, np.int32))
        steps, budgets = np.full(batch, TOKENS_PER_STEP, np.int32), np.full(batch, BUDGET, np.int32)
        drafts = []
        for position in self.positions:
            forest.advance(sequences, self.responses[:, position - TOKENS_PER_STEP : position], steps)
            drafts.append(
                forest.propose(
                    sequences, budgets, BUDGET, chain_only=not tree, novelty=0.0,
                    min_probability=LEAST_PROBABILITY,
                )
            )  # fmt: skip
        return drafts

    def ask_tree(self, suffix_tree: "SuffixTree", tree: bool) -> list:
        return [
            suffix_tree.speculate_ndarray(
                response[max(position - DEPTH, 0) : position], BUDGET, 1e6, 0.0, LEAST_PROBABILITY, tree
            )
            for position in self.positions
            for response in self.responses
        ]

    def quality_of_ours(self, drafts: Sequence[Proposals]) -> dict[str, float]:
        flat = (
            (d.tokens[row, : d.counts[row]].tolist(), d.parents[row, : d.counts[row]].tolist())
            for d in drafts
            for row in range(len(self.responses))
        )
        return self._quality(flat, "")

    def quality_of_theirs(self, drafts: Sequence) -> dict[str, float]:
        return self._quality(((draft.token_ids, draft.parents) for draft in drafts), "baseline_")

    def _quality(self, drafts, prefix: str) -> dict[str, float]:
        """Returns the draft tokens per query, and the number of them with which the response continues."""
        proposed = accepted = 0
        where = ((response, position) for position in self.positions for response in self.responses)
        for (tokens, parents), (response, position) in zip(drafts, where, strict=True):
            proposed += len(tokens)
            nodes = {
                (parent, token): node
                for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
            }
            at, depth = -1, 0
            while (at := nodes.get((at, int(response[position + depth])))) is not None:
                depth += 1
            accepted += depth
        return {f"{prefix}draft_tokens": proposed / len(self), f"{prefix}accepted": accepted / len(self)}


# --- measuring -------------------------------------------------------------------------------------------


def alternate(actions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of every action in every round, without the time of freeing its result."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(-1, repeats):  # the first round warms up
        for name in reversed(actions) if repeat % 2 else actions:
            gc.collect()
            start = time.perf_counter()
            result = actions[name]()
            taken = time.perf_counter() - start
            del result
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def timed_rows(
    name: str, actions: Mapping[str, Callable[[], object]], amount: int, repeats: int,
    details: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Row]:  # fmt: skip
    """Returns a row for every baseline; without any, one row that compares ours with itself.

    Args:
      name: name of the rows, to which "against BASELINE" is added.
      actions: actions by name, ours first.
      amount: number of tokens or queries; a row has the microseconds of one.
      details: by the name of the baseline.
    """
    seconds = alternate(actions, repeats)
    ours, *baselines = actions
    rows = [
        (f"{name} against {baseline}", baseline, compare(seconds[ours], seconds[baseline]))
        for baseline in baselines
    ] or [(name, MISSING, compare(seconds[ours], seconds[ours]))]
    return [
        timed_row(
            row, timing, baseline, "us", 1e6 / amount, amount=amount, **(details or {}).get(baseline, {})
        )
        for row, baseline, timing in rows
    ]


def insert_rows(count: int, length: int, prompts: int, repeats: int) -> list[Row]:
    """Measures microseconds per token: whole responses, token by token, and many prompts."""
    responses = rl_like_responses(0, count, length)
    small = [rl_like_responses(1 + prompt, 8, 256) for prompt in range(prompts)]
    whole: dict[str, Callable[[], object]] = {"ours": lambda: insert_whole([responses])}
    stepwise: dict[str, Callable[[], object]] = {"ours": lambda: insert_stepwise(responses)}
    many: dict[str, Callable[[], object]] = {"ours": lambda: insert_whole(small)}
    if SuffixTree is not None:
        whole[TREE] = lambda: arctic_trees([responses])
        stepwise[TREE] = lambda: arctic_trees([responses], stepwise=True)
        many[TREE] = lambda: arctic_trees(small)
    size = f"{count} x {length}"
    return [
        *timed_rows(f"insert/{size}/whole responses", whole, responses.size, repeats),
        *timed_rows(f"insert/{size}/a token of each at a time", stepwise, responses.size, repeats),
        *timed_rows(f"insert/{prompts} prompts x 8 x 256/whole", many, prompts * 8 * 256, repeats),
    ]


def query_rows(count: int, length: int, repeats: int) -> list[Row]:
    """Measures microseconds per query of held-out responses in batches of `count`."""
    responses = rl_like_responses(0, 2 * count, length)
    stored, queries = responses[:count], Queries.along(responses[count:, :2048])
    forest = insert_whole([stored])
    if SuffixTree is not None:
        (suffix_tree,) = arctic_trees([stored])
    rows = []
    for tree in (False, True):
        actions: dict[str, Callable[[], object]] = {"ours": lambda tree=tree: queries.ask_ours(forest, tree)}
        quality = queries.quality_of_ours(actions["ours"]())
        details = {MISSING: quality}
        if SuffixTree is not None:
            actions[TREE] = lambda tree=tree: queries.ask_tree(suffix_tree, tree)
            details[TREE] = {**quality, **queries.quality_of_theirs(actions[TREE]())}
        name = f"query/{count} x {length}/{'tree' if tree else 'chain'} of {BUDGET}"
        rows += timed_rows(name, actions, len(queries), repeats, details)
    return rows


def memory_rows(count: int, length: int, prompts: int) -> list[Row]:
    """Measures the allocated bytes per token."""
    groups = {
        f"{count} x {length}": [rl_like_responses(0, count, length)],
        f"{prompts} prompts x 8 x 256": [rl_like_responses(1 + prompt, 8, 256) for prompt in range(prompts)],
    }
    rows = []
    for size, traces in groups.items():
        forest = insert_whole(traces)
        tokens = sum(trace.size for trace in traces)
        arctic_bytes = None
        if SuffixTree is not None:
            arctic_bytes = sum(tree.estimate_memory() for tree in arctic_trees(traces)) / tokens
        value = forest.nbytes / tokens
        baseline = MISSING if arctic_bytes is None else TREE
        both, used = (value, arctic_bytes or value), forest.used_bytes / tokens
        rows.append(counted_row(f"memory/{size}", *both, "bytes/token", baseline, less=True, used=used))
    return rows


def begin_rows(prompts: int, count: int, length: int, repeats: int) -> list[Row]:
    """Measures the seconds with which a rollout begins: with automata that history workers have built, and
    with none.
    """
    outcomes = [
        Outcome((prompt,), response, float(response[0]))
        for prompt in range(prompts)
        for response in rl_like_responses(prompt, count, length)
    ]
    requests = [DraftRequest((prompt,), None) for prompt in range(prompts)]
    drafters = {
        workers: make_drafter("histospec", history_workers=workers, indexed_tokens=prompts * count * length)
        for workers in (1, 0)
    }
    seconds: dict[int, list[float]] = {workers: [] for workers in drafters}
    for repeat in range(-1, repeats):  # the first round warms up
        for workers, drafter in drafters.items():
            drafter.learn(outcomes)
            drafter.index.wait()  # as an update of the policy takes longer
            start = time.perf_counter()
            drafter.begin(requests)
            if repeat >= 0:
                seconds[workers].append(time.perf_counter() - start)
    metrics = drafters[1].metrics()
    return [
        timed_row(
            f"begin/{prompts} prompts x {count} x {length}",
            compare(seconds[1], seconds[0]),
            "automata built when the rollout begins",
            "ms",
            1e3,
            tokens=prompts * count * length,
            prompts=metrics["history_prompts"],
            indexed_ahead=metrics["history_indexed_ahead"],
        )
    ]


def announce(sections: Sequence[str]) -> None:
    """Prints a line about a missing baseline, before minutes of measurements."""
    if SuffixTree is None:
        print("arctic-inference is not installed: rows that compare with it carry our values alone")


BENCHMARK = Benchmark(
    name="suffix_cache",
    description=__doc__,
    plan=(
        Measurement("insert", "64 x 4096", insert_rows, (64, 4096, 512, 5)),
        Measurement("query", "64 x 4096", query_rows, (64, 4096, 5)),
        Measurement("memory", "64 x 4096", memory_rows, (64, 4096, 512), disturbed=False),
        Measurement("begin", "64 prompts x 16 x 512", begin_rows, (64, 16, 512, 5)),
    ),
    packages=("numba", "numpy", "arctic-inference"),
    prepare=announce,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
