"""Share of a response that is predicted before its step: by sampling ahead with the noise of the request,
with other noise, or by earlier epochs; after updates of several sizes.

The policy is not grown, since acceptance does not depend on the cost of a pass. Every slot verifies as many
drafts as allowed, on recorded responses, so only the drafts differ.
"""

from collections.abc import Sequence

import numpy as np

from drafters.aligned import AlignedDrafter
from drafters.base import Drafter, DraftRequest, Drafts, Queries, Sampled
from drafters.registry import make_drafter
from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig
from rljax.requests import Completion, Request
from rljax.training import loop
from rljax.training.training_run import TrainingRun
from rollout_benchmarks.variants import collect_step, open_run, step_requests, unrewarded, with_keys

_OTHER_NOISE = 1000  # a purpose that nothing else uses
_NOISE = {"own noise": "own noise", "other noise": "other noise", "other noise, as a chain": "other noise"}
_AHEAD = tuple(_NOISE)
_CHAINS = ("own noise", "other noise, as a chain")  # proposed by `AlignedDrafter` up to the first difference


def ahead_rows(config: ExperimentConfig, learning_rates: Sequence[float], steps: int) -> list[Row]:
    """Measures tokens per pass with drafts sampled ahead, against drafts from the history alone."""
    rows = []
    for rate in learning_rates:
        with open_run(small_policy(config, rate, steps)) as (run, progress):
            progress.stage("bench", steps)
            counts = {name: np.zeros(2, int) for name in ("history", *_AHEAD)}
            shares = {name: np.zeros(2, int) for name in ("own noise", "other noise")}
            chains = {name: np.zeros(2, int) for name in _CHAINS}  # (accepted, sampled ahead)
            drafters = {name: make_drafter("srt", rollouts=4) for name in counts}
            ahead: dict[str, list[Completion]] = {}
            for step in range(steps):
                requests = step_requests(run, step)
                groups, _, _ = collect_step(run, run.collector, step)
                completions = [completion for group in groups for completion in group.completions]
                for name, drafter in drafters.items():
                    asked = [
                        DraftRequest(request.prompt_ids, None, known)
                        for request, known in zip(requests, _known(name, ahead, requests), strict=True)
                    ]
                    follows = AlignedDrafter(drafter) if name in _CHAINS else drafter
                    if name == "other noise" and ahead:  # SRT caches responses of any noise
                        drafter.learn(unrewarded(requests, ahead["other noise"]))
                    passes = replay(follows, asked, completions, config.speculation.max_drafts)
                    if step:
                        counts[name] += passes
                    if name in _CHAINS:
                        chains[name] += follows.tokens_accepted, follows.tokens_ahead
                    drafter.learn(unrewarded(requests, completions))
                if step:
                    for name, share in shares.items():
                        share += _agreement(ahead[name], completions)
                upcoming = step_requests(run, step + 1)
                ahead = {
                    "own noise": decode(run, upcoming),
                    "other noise": decode(run, step_requests(run, step + 1, _OTHER_NOISE)),
                }
                loop.learn(run, groups)
                progress.step(step + 1, {"tokens_per_second": 0.0})
        lengths = {name: tokens / passes for name, (tokens, passes) in counts.items()}
        for name in _AHEAD:
            same, sampled = shares[_NOISE[name]]
            details = {
                "tokens": int(counts[name][0]),
                "steps": steps - 1,
                "share_before_the_first_difference": same / sampled,
            }
            if name in _CHAINS:
                accepted, offered = chains[name]
                details["accepted_share_of_tokens_ahead"] = accepted / offered
            row = f"ahead/learning rate {rate:g}/{name}"
            both = lengths[name], lengths["history"]
            rows.append(counted_row(row, *both, "tokens a pass", "history alone", **details))
    return rows


def small_policy(config: ExperimentConfig, learning_rate: float, steps: int) -> ExperimentConfig:
    """Returns the config without growth and drafts, with batches as large as its steps."""
    return with_keys(
        config,
        policy={"growth": None},
        optimizer={"learning_rate": learning_rate},
        engine={"max_slots": 64, "batch_buckets": (2, 8, 64)},
        training={"steps": steps},
        speculation={"drafter": None},
    )


def replay(
    drafter: Drafter, asked: Sequence[DraftRequest], completions: Sequence[Completion], width: int
) -> np.ndarray:
    """Returns (tokens, passes) when every pass verifies up to `width` drafts of every request."""
    drafter.begin(asked)
    known = np.zeros(len(asked), np.int32)
    lengths = np.asarray([len(each.response_ids) for each in completions])
    tokens = passes = 0
    while (active := np.flatnonzero(known < lengths)).size:
        positions = np.asarray([len(asked[i].prompt_ids) for i in active]) + known[active]
        budgets = np.full(len(active), width, np.int32)
        drafts = drafter.propose(Queries(active.astype(np.int32), positions.astype(np.int32), budgets, width))
        sampled = np.zeros((len(active), width + 1), np.int32)
        accepted = np.zeros(len(active), np.int32)
        for row, index in enumerate(active):
            left = completions[index].response_ids[known[index] :]
            accepted[row] = min(_accepted(drafts, row, left), len(left) - 1)
            sampled[row, : accepted[row] + 1] = left[: accepted[row] + 1]
        known[active] += accepted + 1
        ended = known[active] == lengths[active]
        requests = active.astype(np.int32)
        drafter.observe(Sampled(requests, sampled, accepted + 1, drafts.counts, accepted, ended))
        tokens += int((accepted + 1).sum())
        passes += len(active)
    return np.asarray([tokens, passes])


def _accepted(drafts: Drafts, row: int, tokens: np.ndarray) -> int:
    """Returns the number of a tree's nodes on the path of `tokens`."""
    node, depth = -1, 0
    while depth < len(tokens):
        children = np.flatnonzero(drafts.parents[row, : drafts.counts[row]] == node)
        right = children[drafts.tokens[row, children] == tokens[depth]]
        if not right.size:
            break
        node, depth = right[0], depth + 1
    return depth


def decode(run: TrainingRun, requests: Sequence[Request]) -> list[Completion]:
    """Decodes responses by the current policy."""
    return run.collector.scheduler.run(run.engine.load_params(run.state.params), requests)[0]


def _known(
    name: str, ahead: dict[str, list[Completion]], requests: Sequence[Request]
) -> list[np.ndarray | None]:
    if name not in _CHAINS or not ahead:
        return [None] * len(requests)
    return [completion.response_ids for completion in ahead[_NOISE[name]]]


def _agreement(drafts: Sequence[Completion], completions: Sequence[Completion]) -> np.ndarray:
    """Returns (tokens before the first difference from the sample taken ahead, all tokens)."""
    same = 0
    for draft, completion in zip(drafts, completions, strict=True):
        length = min(len(draft.response_ids), len(completion.response_ids))
        agree = draft.response_ids[:length] == completion.response_ids[:length]
        same += length if agree.all() else int(np.argmin(agree))
    return np.asarray([same, sum(len(completion.response_ids) for completion in completions)])
