"""The history drafters' automata: `python scripts/bench_suffix_cache.py [--only SECTIONS]`.

Microseconds per token inserted and per query and bytes per token, against the C++ suffix tree of
arctic-inference on the same traces, both sides in one process and in alternation. arctic-inference builds
from source (`pip install arctic-inference`; the build needs CMake, a C++ compiler, nanobind and PyTorch).
Without it, its rows hold only our values.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from drafters.base import DraftRequest, Outcome
from drafters.registry import make_drafter
from drafters.suffix_automaton import Proposals, SuffixForest
from rljax.benchmark_runs import Benchmark, Measurement
from rljax.benchmarking import Row, counted_row, timed_row
from rljax.timing import compare, interleave

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


def insert(groups: Sequence[np.ndarray], stepwise: bool = False) -> SuffixForest:
    """A forest of one automaton a prompt. Groups [responses, T] are inserted one after the other: whole, or a
    token of every response per call, as in sampling.
    """
    forest = SuffixForest(DEPTH)
    for responses in groups:
        width = 1 if stepwise else responses.shape[1]
        sequences = forest.start(np.full(len(responses), forest.add_root(), np.int32))
        counts = np.full(len(responses), width, np.int32)
        for first in range(0, responses.shape[1], width):
            forest.extend(sequences, responses[:, first : first + width], counts)
    return forest


def arctic_trees(groups: Sequence[np.ndarray], stepwise: bool = False) -> list["SuffixTree"]:
    """Fills arctic's C++ trees directly, one per prompt."""
    trees = []
    for responses in groups:
        tree, width = SuffixTree(DEPTH), 1 if stepwise else responses.shape[1]
        for first in range(0, responses.shape[1], width):
            for request, response in enumerate(responses):
                tree.extend_ndarray(request, response[first : first + width])
        trees.append(tree)
    return trees


Nodes = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents of a draft."""


@dataclasses.dataclass(frozen=True)
class Queries:
    """Drafts for held-out responses, int32 [B, T], from these positions on, asked of all implementations."""

    responses: np.ndarray
    positions: range

    def __len__(self) -> int:
        return len(self.responses) * len(self.positions)

    def ask_ours(self, forest: SuffixForest, tree: bool) -> list[Proposals]:
        """Asks our forest. This includes following the responses, since arctic matches the context per
        query.
        """
        batch = len(self.responses)
        sequences = forest.track(np.zeros(batch, np.int32))
        steps, budgets = np.full(batch, TOKENS_PER_STEP, np.int32), np.full(batch, BUDGET, np.int32)
        options = {"chain_only": not tree, "novelty": 0.0, "min_probability": LEAST_PROBABILITY}
        drafts = []
        for position in self.positions:
            forest.advance(sequences, self.responses[:, position - TOKENS_PER_STEP : position], steps)
            drafts.append(forest.propose(sequences, budgets, BUDGET, **options))
        return drafts

    def ask_tree(self, suffix_tree: "SuffixTree", tree: bool) -> list:
        return [
            suffix_tree.speculate_ndarray(
                response[max(position - DEPTH, 0) : position], BUDGET, 1e6, 0.0, LEAST_PROBABILITY, tree
            )
            for position in self.positions
            for response in self.responses
        ]

    def quality(self, drafts: Iterable[Nodes]) -> tuple[float, float]:
        """Returns the draft tokens per query, and the number of them with which the response continues."""
        proposed = accepted = 0
        where = ((response, position) for position in self.positions for response in self.responses)
        for (tokens, parents), (response, position) in zip(drafts, where, strict=True):
            proposed += len(tokens)
            nodes = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
            at, depth = -1, 0
            while (at := nodes.get((at, int(response[position + depth])))) is not None:
                depth += 1
            accepted += depth
        return proposed / len(self), accepted / len(self)


# --- measuring -------------------------------------------------------------------------------------------


def timed_rows(
    name: str, actions: Mapping[str, Callable[[], object]], amount: int, repeats: int, **details: object
) -> list[Row]:
    """Returns the row of ours against the baseline; without one, against ourselves. It has the microseconds
    of one of `amount` tokens or queries.
    """
    seconds = list(interleave(actions, repeats).values())
    baseline = TREE if len(seconds) > 1 else MISSING
    name = f"{name} against {baseline}" if len(seconds) > 1 else name
    timing = compare(seconds[0], seconds[-1])
    return [timed_row(name, timing, baseline, "us", 1e6 / amount, amount=amount, **details)]


def traces(count: int, length: int, prompts: int) -> dict[str, list[np.ndarray]]:
    """One prompt's long responses, and eight short ones of each of many prompts, by name."""
    return {
        f"{count} x {length}": [rl_like_responses(0, count, length)],
        f"{prompts} prompts x 8 x 256": [rl_like_responses(1 + prompt, 8, 256) for prompt in range(prompts)],
    }


def insert_rows(count: int, length: int, prompts: int, repeats: int) -> list[Row]:
    """Measures microseconds per token: whole responses, token by token, and many prompts."""
    (one, long), (many, small) = traces(count, length, prompts).items()
    rows = []
    for name, groups, stepwise in (
        (f"{one}/whole responses", long, False),
        (f"{one}/a token of each at a time", long, True),
        (f"{many}/whole", small, False),
    ):
        actions = {"ours": functools.partial(insert, groups, stepwise)}
        if SuffixTree is not None:
            actions[TREE] = functools.partial(arctic_trees, groups, stepwise)
        rows += timed_rows(f"insert/{name}", actions, sum(group.size for group in groups), repeats)
    return rows


def query_rows(count: int, length: int, repeats: int) -> list[Row]:
    """Measures microseconds per query of held-out responses in batches of `count`."""
    responses = rl_like_responses(0, 2 * count, length)
    stored, asked = responses[:count], responses[count:, :2048]
    queries = Queries(asked, range(TOKENS_PER_STEP, asked.shape[1] - BUDGET, TOKENS_PER_STEP))
    forest, rows = insert([stored]), []
    for tree in (False, True):
        actions = {"ours": functools.partial(queries.ask_ours, forest, tree)}
        ours, names = queries.quality(nodes_of(actions["ours"]())), ("draft_tokens", "accepted")
        details = dict(zip(names, ours, strict=True))
        if SuffixTree is not None:
            actions[TREE] = functools.partial(queries.ask_tree, *arctic_trees([stored]), tree)
            theirs = queries.quality((each.token_ids, each.parents) for each in actions[TREE]())
            details |= {f"baseline_{name}": each for name, each in zip(names, theirs, strict=True)}
        name = f"query/{count} x {length}/{'tree' if tree else 'chain'} of {BUDGET}"
        rows += timed_rows(name, actions, len(queries), repeats, **details)
    return rows


def nodes_of(drafts: Iterable[Proposals]) -> list[Nodes]:
    """Flat drafts of all positions and responses."""
    return [
        (each.tokens[row, :count].tolist(), each.parents[row, :count].tolist())
        for each in drafts
        for row, count in enumerate(each.counts)
    ]


def memory_rows(count: int, length: int, prompts: int) -> list[Row]:
    """Measures the allocated bytes per token."""
    rows = []
    for size, groups in traces(count, length, prompts).items():
        forest, tokens = insert(groups), sum(group.size for group in groups)
        baseline, value = MISSING, forest.nbytes / tokens
        theirs, used = value, forest.used_bytes / tokens
        if SuffixTree is not None:
            baseline = TREE
            theirs = sum(tree.estimate_memory() for tree in arctic_trees(groups)) / tokens
        both = value, theirs
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
    tokens = prompts * count * length
    limits = {"indexed_tokens": tokens}
    drafters = {n: make_drafter("histospec", history_workers=n, **limits) for n in (1, 0)}
    seconds: dict[int, list[float]] = {workers: [] for workers in drafters}
    for _ in range(1 + repeats):  # the first round warms up
        for workers, drafter in drafters.items():
            drafter.learn(outcomes)
            drafter.index.wait()  # as an update of the policy takes longer
            start = time.perf_counter()
            drafter.begin(requests)
            seconds[workers].append(time.perf_counter() - start)
    metrics, timing = drafters[1].metrics(), compare(seconds[1][1:], seconds[0][1:])
    counts = {"prompts": metrics["history_prompts"], "indexed_ahead": metrics["history_indexed_ahead"]}
    name, against = f"begin/{prompts} prompts x {count} x {length}", "automata built when the rollout begins"
    return [timed_row(name, timing, against, "ms", 1e3, tokens=tokens, **counts)]


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
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
