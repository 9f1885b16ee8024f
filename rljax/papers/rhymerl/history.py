"""What HistoPipe goes by: what rollouts were like."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rljax.assembly.checkpoint import ROUTING
from rljax.papers.rhymerl.histopipe import growth_factor
from rljax.requests import Completion, DecodeStatistics, Request

_MOST_PROMPTS = 100_000  # those decoded last are remembered
_MOST_WORK = 64  # measurements, the latest

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a worker did in a rollout; all but the last are of `DecodeStatistics`.

    Attributes:
      seconds: in which it decoded, drafting on the device and training of drafters left out.
    """

    steps: float
    rows: float
    cached_tokens: float
    verified: float
    verified_slots: float
    verified_rows: float
    accepted: float
    draft_seconds: float
    seconds: float


@dataclasses.dataclass
class RolloutHistory:
    """What rollouts were like: lengths of each prompt's last group, and times. A checkpoint keeps it, so that
    a run that is resumed routes as if nothing had been.

    Attributes:
      lengths: of the responses to each prompt when it was last trained on.
      train_seconds: from the end of the last rollout to the beginning of the next one.
    """

    lengths: dict[Prompt, list[int]] = dataclasses.field(default_factory=dict)
    train_seconds: float = 0.0
    _growth: dict[Prompt, tuple[float, float]] = dataclasses.field(default_factory=dict)
    _work: list[Work] = dataclasses.field(default_factory=list)

    def learn(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Takes the responses of a training rollout."""
        now: dict[Prompt, list[int]] = {}
        for request, completion in zip(requests, completions, strict=True):
            if request.training:
                now.setdefault(request.prompt_ids, []).append(len(completion.response_ids))
        for prompt, lengths in now.items():
            before = self.lengths.pop(prompt, None)
            self.lengths[prompt] = lengths
            if before is not None:
                self._growth.pop(prompt, None)
                self._growth[prompt] = statistics.median(before), statistics.median(lengths)
        for table in (self.lengths, self._growth):
            while len(table) > _MOST_PROMPTS:
                del table[next(iter(table))]  # type: ignore[attr-defined]

    def measure(self, by_worker: Mapping[str, tuple[DecodeStatistics, float]]) -> None:
        """Takes what workers counted in a rollout, and the seconds in which they were busy."""
        names = [field.name for field in dataclasses.fields(Work)][:-1]
        self._work += [
            Work(
                *(getattr(counts, name) for name in names), busy - counts.draft_seconds - counts.train_seconds
            )
            for counts, busy in by_worker.values()
            if counts.steps
        ]
        del self._work[:-_MOST_WORK]

    @property
    def growth(self) -> float:
        """beta of the rule of outliers."""
        before = {prompt: pair[0] for prompt, pair in self._growth.items()}
        return growth_factor(before, {prompt: pair[1] for prompt, pair in self._growth.items()})

    def token_seconds(self, max_batch: int) -> Callable[[int, float], float]:
        """Returns (running responses, tokens of all of them in the cache) -> seconds of a token of each.

        As the simulator has it (`rljax.simulation.drafting`): a pass is affine in its rows and in the tokens
        that it reads from the cache; drafts add rows, take their time, and bring tokens. What is
        faster counts, as managers choose.

        Args:
          max_batch: responses up to which a worker drafts; 0 for never.
        """
        if not self._work:
            return lambda running, cached: 1.0
        table = np.asarray([dataclasses.astuple(work) for work in self._work])
        fixed, row, of_cache = _nonnegative(table[:, :3], table[:, -1])
        *_, verified, slots, rows, accepted, drafting, _ = table.sum(axis=0).tolist()

        def seconds(running: int, cached: float) -> float:
            plain = fixed + row * running + of_cache * cached
            if running > max_batch or not slots:
                return plain
            passes = fixed + row * running * rows / slots + of_cache * cached + drafting / verified
            return min(plain, passes / (1 + accepted / slots))

        return seconds

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps: `ROUTING` begins their names."""
        prompts = list(self.lengths)
        growth = [self._growth.get(prompt, (np.nan, np.nan)) for prompt in prompts]
        arrays = {
            "prompts": np.asarray([token for prompt in prompts for token in prompt], np.int32),
            "prompt_sizes": np.asarray([len(prompt) for prompt in prompts], np.int64),
            "lengths": np.asarray([each for lengths in self.lengths.values() for each in lengths], np.int64),
            "group_sizes": np.asarray([len(lengths) for lengths in self.lengths.values()], np.int64),
            "growth": np.asarray(growth, np.float64).reshape(-1, 2),
            "work": np.asarray([dataclasses.astuple(work) for work in self._work], np.float64).reshape(
                -1, len(dataclasses.fields(Work))
            ),
            "train_seconds": np.asarray(self.train_seconds, np.float64),
        }
        return {ROUTING + name: array for name, array in arrays.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned; nothing of it is that of a run without workers."""
        if ROUTING + "prompts" not in state:
            return
        arrays = {name.removeprefix(ROUTING): array for name, array in state.items()}
        prompts = [tuple(each) for each in _cut(arrays["prompts"], arrays["prompt_sizes"])]
        lengths = _cut(arrays["lengths"], arrays["group_sizes"])
        self.lengths = dict(zip(prompts, lengths, strict=True))
        growth = zip(prompts, arrays["growth"].tolist(), strict=True)
        self._growth = {prompt: (before, now) for prompt, (before, now) in growth if before == before}
        # Checkpoints from before cached tokens and drafts were counted have "passes", which say too little.
        self._work = [Work(*row) for row in arrays["work"].tolist()] if "work" in arrays else []
        self.train_seconds = float(arrays["train_seconds"])


def _cut(flat: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
    """Returns the lists of these sizes that were joined to an array."""
    ends = np.cumsum(sizes).tolist()
    return [flat[begin:end].tolist() for begin, end in zip([0, *ends[:-1]], ends, strict=False)]


def _nonnegative(columns: np.ndarray, target: np.ndarray) -> list[float]:
    """Returns the factors of columns [n, k] that add up to a target [n] with the least squares, none of them
    below 0; of several choices the one with the fewest, and first, columns.
    """
    scale = np.where(columns.any(axis=0), np.linalg.norm(columns, axis=0), 1.0)
    columns, best, least = columns / scale, np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), count)):
            factors, _, rank, _ = np.linalg.lstsq(columns[:, chosen], target, rcond=1e-6)
            rest = float(np.sum((columns[:, chosen] @ factors - target) ** 2))
            if rank == count and (factors >= 0).all() and rest < least * (1 - 1e-6) - 1e-12:
                best, least = np.zeros(columns.shape[1]), rest
                best[chosen] = factors
    return (best / scale).tolist()
