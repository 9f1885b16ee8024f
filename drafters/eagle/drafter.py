"""The head as a drafter: it drafts for the engine's slots (`slots.py`), and learns from their responses.

It is trained (`spot_trainer.py`) on the features that every forward pass of the engine hands out, so it needs
no forward pass of its own. Where other processes decode, their passes' features stay there: the process that
trains computes some of them again (`read`), and the others draft with frozen copies of its head (`weights`).
"""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax import Array

from drafters.base import DraftRequest, Outcome, Sampled
from drafters.device import TrainingLimits
from drafters.eagle.arguments import EagleArguments
from drafters.eagle.checkpoint import load_head
from drafters.eagle.drafting import DrafterState, DraftStrategy, ScoredTree
from drafters.eagle.head_session import HeadSession
from drafters.eagle.head_state import FrozenHead
from drafters.eagle.model import HeadConfig, init_head, shared_params
from drafters.eagle.saving import AsyncHeadSaver
from drafters.eagle.slots import HeadSlots, head_numerics
from drafters.eagle.spot_trainer import BufferSettings, HeadTrainer, head_optimizer
from drafters.eagle.states import StateReader, States
from drafters.eagle.time_budget import TimeBudget
from rljax.engine.draft_tree import most_nodes
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool
from rljax.engine.host_sync import Assignment, DecodeResult
from rljax.engine.state import DecodeState, Prefix
from rljax.errors import CheckpointError, ConfigError, DrafterError
from rljax.models.config import ModelConfig
from rljax.models.rope import rope_table
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.numerics.rows import tree_cast
from rljax.processes import is_first, to_host

_TOTALS = ("absorbed_early", "lost_contexts", "dropped_running")  # metrics that count over the run


class EagleDrafter:
    """A head that drafts and learns beside the policy.

    Args:
      arguments: see `EagleArguments`.

    Attributes:
      config: the head's shape, after `reads`.
      slots: its state for the engine's slots, after `attach`.
    """

    def __init__(self, arguments: EagleArguments) -> None:
        self.arguments = arguments
        self.strategies: tuple[DraftStrategy, ...] = ()
        self.train_below = arguments.train_below
        self._loaded: Params | None = None
        self._saver: AsyncHeadSaver | None = None
        if arguments.save_dir is not None:
            stops = arguments.on_save_failure == "stop"
            self._saver = AsyncHeadSaver(arguments.save_dir, None if stops else _warn)
        self._shared: Params | None = None
        self._frozen = False
        self._delegated = False  # workers train the head
        self._adopted: dict[str, float] = {}  # metrics of their last update
        self._trainer: HeadTrainer | FrozenHead | None = None
        self._reader: StateReader | None = None
        self._restored: dict[str, np.ndarray] | None = None  # for the trainer, when there is one
        self._step = 0
        self._slices = 0  # slices of this rollout
        self._update_is_ready = True
        self._learned = False  # `learn` was called in this step; the next policy begins another step
        self._budget = TimeBudget(arguments.train_share)
        self._last_metrics: dict[str, float] = {}
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._begin_collecting([])

    # -- what it drafts for ----------------------------------------------------------------------------------

    def reads(self, policy: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        arguments = self.arguments
        self.config = HeadConfig(arguments.variant, policy)
        if arguments.path is not None:
            self.config, self._loaded = load_head(arguments.path, policy)
            if self.config.fused != (arguments.variant == "eagle3"):
                raise ConfigError(
                    f"speculation.args.path: {arguments.path} is no head of variant {arguments.variant}"
                )
        return self.config.layers

    def attach(self, engine: DecodeEngine) -> None:
        arguments, most = self.arguments, engine.buckets.max_drafts
        self._engine = engine
        self.slots = HeadSlots(self.config, engine, max(arguments.depths), arguments.unread_bytes)
        strategies = []
        for depth in sorted(set(arguments.depths)):
            whole = most_nodes(depth, arguments.top_k)
            strategies.append(
                DraftStrategy(depth, arguments.top_k, min(arguments.nodes or most, most, whole))
            )
        self.strategies = tuple(strategies)

    def refresh(self, params: Params) -> None:
        before, self._shared = self._shared, shared_params(params, self._engine.config)
        if self._trainer is None:
            self._trainer = self._make_trainer(params)
            self._trainer.begin_step(self._step)
            if self._restored is not None:
                self._trainer.load_state(self._restored)
                self._restored = None  # it holds a whole buffer of features
        moved = before is None or before["embed"] is not self._shared["embed"]
        if self._learned and moved:  # the rollouts of a step (dynamic sampling) share a policy
            self._step, self._learned = self._step + 1, False
            self._trainer.begin_step(self._step)
        self.slots.use(tree_cast(self._trainer.params, self.slots.numerics.dtype), self._shared)

    @property
    def params(self) -> Params | None:
        """The head's present weights; None before the first rollout."""
        return None if self._trainer is None else self._trainer.params

    @property
    def trained(self) -> bool:
        return self._loaded is not None or (self._trainer is not None and self._trainer.updates > 0)

    def freeze(self) -> None:
        self.arguments = self.arguments.model_copy(update={"train": False})
        self._frozen = True

    def _make_trainer(self, policy_params: Params) -> HeadTrainer | FrozenHead:
        head = self._loaded
        if head is None:
            head = init_head(self.config, policy_params, self.arguments.seed)
        return FrozenHead(head) if self._frozen else self._make_head_trainer(head)

    def _make_head_trainer(self, head: Params, pool: ExecutablePool | None = None) -> HeadTrainer:
        arguments, training = self.arguments, self.arguments.training
        return HeadTrainer(
            self.config,
            training,
            head_optimizer(arguments.learning_rate),
            rope_table(self._engine.config, arguments.pack_length + training.steps),
            head_numerics(self._engine, self._engine.mesh),
            BufferSettings(arguments.buffer_bytes, previous_share=arguments.previous_share),
            arguments.pack_length,
            arguments.rows,
            arguments.seed,
            head,
            pool,
            self._engine.mesh,
        )

    def warm_up(
        self, prefixes: Sequence[Prefix], batches: Sequence[int], prompt_length: int, widens: bool = False
    ) -> None:
        self.slots.warm_up(prefixes, batches, widens)
        if self._trains:
            self._budget.expect(self._trainer.warm_up(self._shared))

    def compile(
        self,
        batch: int,
        largest: int,
        lengths: Sequence[int],
        prefixes: Sequence[Prefix],
        padded: Sequence[tuple[int, int]],
        should_stop: Callable[[], bool],
    ) -> Callable[[], None] | None:
        self.slots.compile(batch, largest, lengths, prefixes, self.strategies, should_stop)
        if not self._trains or should_stop():
            return None
        self._trainer.compile(self._shared)
        return self._may_train

    def _may_train(self) -> None:
        """The update is compiled: measures it."""
        if not self._update_is_ready:
            self._budget.expect(self._trainer.warm_up(self._shared))
            self._update_is_ready = True

    # -- slots -----------------------------------------------------------------------------------------------

    def compiles_behind(self) -> None:
        self._update_is_ready = False

    def leave(self) -> None:
        """Drops the responses under way: features of their further tokens are missing."""
        for request in list(self._tokens):
            self._drop(request)
        self._requests.clear()
        if self._trainer is not None:
            self._trainer.reserve(0)

    def start(self, batch: int) -> None:
        self.slots.start(batch)

    def prefill(self, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> "PrefilledHead":
        states = to_host(prefix.states) if self._collects else None
        return PrefilledHead(self.slots.prefill(prefix, prompts), states, tuple(map(len, prompts)))

    def insert(
        self, prefilled: "PrefilledHead", assignments: Sequence[Assignment], requests: Sequence[int]
    ) -> None:
        rows, slots = ([getattr(each, name) for each in assignments] for name in ("row", "slot"))
        self.slots.insert(prefilled.state, rows, slots)
        for row, slot, request in zip(rows, slots, requests, strict=True):
            self._requests[slot] = request
            if self._trainable[request]:
                known = len(self._prompts[request]) - 1
                self._drop(request)
                self._keep(request, prefilled.states[row, :known])
                self._tokens[request] = list(self._prompts[request])
        if self._collects:
            self._bound_memory()

    def advance(self, result: DecodeResult) -> None:
        counts = self.slots.advance(result)
        self._totals["absorbed_early"] += self.slots.make_room()
        self._collect(result.states, counts)

    def append(
        self, slots: Sequence[int], sizes: Sequence[int], tokens: np.ndarray, counts: np.ndarray
    ) -> None:
        """Empties the slots and does not train on their responses: appended tokens come without features."""
        self.slots.forget(slots)
        self._totals["lost_contexts"] += len(slots)
        for slot in slots:
            self._drop(self._requests.get(slot))

    def compact(self, slots: Sequence[int], batch: int) -> None:
        self.slots.compact(slots, batch)
        kept = dict(enumerate(slots))
        self._requests = {new: self._requests[old] for new, old in kept.items() if old in self._requests}

    def widen(self, batch: int) -> None:
        self.slots.widen(batch)

    def draft(self, state: DecodeState, strategy: DraftStrategy) -> ScoredTree:
        return self.slots.draft(state, strategy)

    # -- what a drafter hears --------------------------------------------------------------------------------

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._budget.resume()
        self._begin_collecting(requests)

    def observe(self, sampled: Sampled) -> None:
        """Adds the tokens that were kept, and complete responses to the buffer."""
        for row, request in enumerate(sampled.requests.tolist()):
            if request not in self._tokens:
                continue
            self._tokens[request] += sampled.tokens[row, : sampled.counts[row]].tolist()
            if sampled.ended[row]:
                tokens, states = self._tokens[request], self._states[request]
                self._drop(request)
                self._bound_memory()
                self._add(len(self._prompts[request]), tokens, states)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Ends a rollout: runs the slices that are left, as time allows; the policy's update waits for it."""
        if self.arguments.train and self._trainer is not None:
            while self.train():
                pass
            self._last_metrics = self._trainer.metrics() | self._adopted
            if self._saver is not None:
                params = to_host(self._trainer.params)
                with _saving():
                    if is_first():
                        self._saver.save(self._step, params, self.config)
            self._slices, self._learned = 0, True

    def state(self) -> dict[str, np.ndarray]:
        if self._saver is not None:  # wait for the save under way: the last step ends with a checkpoint
            with _saving():
                self._saver.wait()
        position = {"step": np.asarray(self._step, np.int64), "learned": np.asarray(self._learned)}
        position |= {name: np.asarray(total, np.int64) for name, total in self._totals.items()}
        if self._trainer is None:  # no rollout yet
            return {} if self._restored is None else position | self._restored
        return position | self._trainer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        state = dict(state)
        self._step, self._learned = int(state.pop("step")), bool(state.pop("learned", False))
        self._totals = {name: int(state.pop(name, 0)) for name in _TOTALS}
        if self._trainer is None:  # it needs the policy's weights, which come with `refresh`
            self._restored = state
        else:
            self._trainer.load_state(state)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `HeadTrainer.metrics` and these totals of the run, as `head/...`:
        `absorbed_early`, host syncs whose features were absorbed because `unread_bytes` was full;
        `lost_contexts`, the number of times that a slot was emptied since appended tokens have no features;
        `dropped_running`, running responses that are not trained on, since `buffer_bytes` had no room.
        """
        return {f"head/{name}": value for name, value in (self._last_metrics | self._totals).items()}

    # -- responses of other processes ------------------------------------------------------------------------

    def read(
        self, params: Params, responses: Sequence[tuple[Sequence[int], np.ndarray]], seconds: float
    ) -> None:
        """Adds responses to the buffer, no more of them than the step's slices have room for, evenly spread:
        computing their features again takes a forward pass.
        """
        if not self._trains:
            return
        self.refresh(params)
        if self._delegated:
            return
        if self._reader is None:
            self._budget.expect(self._trainer.warm_up(self._shared))
        self._budget.earn(seconds)
        tokens = sum(len(prompt) + len(response) for prompt, response in responses)
        every = max(1, -(-tokens // self.limits.tokens))
        for ids, states, mask in self._state_reader().read(params, responses[::every]):
            known = len(ids) - 1  # the policy has not read the last token
            self._trainer.add(ids[:known], states[:known], mask[:known])

    def _state_reader(self) -> StateReader:
        if self._reader is None:
            longest = self._engine.buckets.cache[-1]
            numerics = dataclasses.replace(self._engine.numerics, row_invariant=False)  # it decides no token
            self._reader = StateReader(self.config, numerics, longest, rows=1)
        return self._reader

    def weights(self) -> dict[str, np.ndarray]:
        if self._trainer is not None:
            weights = self._trainer.weights()
        else:  # no rollout yet
            restored = self._restored or {}
            weights = {
                name: array
                for name, array in restored.items()
                if name.startswith("train.params.") or name == "train.updates"
            }
        return weights and weights | {"step": np.asarray(self._step, np.int64)}

    # -- training by workers ---------------------------------------------------------------------------------

    @property
    def limits(self) -> TrainingLimits:
        arguments = self.arguments
        updates = arguments.slices if arguments.train else 0
        tokens = arguments.slices * arguments.rows * arguments.pack_length
        return TrainingLimits(updates, tokens, self._engine.buckets.cache[-1], arguments.train_every)

    def delegate(self) -> None:
        self._delegated = True

    def saved(self) -> dict[str, np.ndarray]:
        if self._trainer is not None:
            leaves = to_host(self._trainer.trained_leaves())
            return {name: np.array(leaf) for name, leaf in leaves.items()}
        restored = self._restored or {}
        return {name: array for name, array in restored.items() if name.startswith("train.")}

    def adopt(self, saved: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> None:
        self._trainer.load_trained(saved)
        self._adopted = dict(metrics)

    def warm_up_session(self, params: Params) -> None:
        self.prepare(params, [((0,), (0, 0))])
        head = init_head(self.config, params, self.arguments.seed)
        self._make_head_trainer(head, self._engine.pool).warm_up(shared_params(params, self._engine.config))

    def prepare(self, params: Params, samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[States]:
        return list(self._state_reader().read(params, samples))

    def session(self, params: Params, saved: Mapping[str, np.ndarray] | None) -> HeadSession:
        trainer = self._make_head_trainer(self._trainer.params, self._engine.pool)
        return HeadSession(trainer, shared_params(params, self._engine.config), saved)

    # -- training --------------------------------------------------------------------------------------------

    @property
    def _trains(self) -> bool:
        return self.arguments.train and self.arguments.slices > 0

    @property
    def _collects(self) -> bool:
        return any(self._trainable)

    def _begin_collecting(self, requests: Sequence[DraftRequest]) -> None:
        self._trainable = [self._trains and request.trainable for request in requests]
        self._prompts = [request.prompt_ids for request in requests]
        self._requests: dict[int, int] = {}  # by slot
        self._states: dict[int, list[np.ndarray]] = {}  # features by request, of all tokens but the last
        self._sizes: dict[int, int] = {}  # their bytes; a prompt that a group shares counts for each request
        self._tokens: dict[int, list[int]] = {}
        if self._trainer is not None:
            self._trainer.reserve(0)

    def _keep(self, request: int, states: np.ndarray) -> None:
        self._states.setdefault(request, []).append(states)
        self._sizes[request] = self._sizes.get(request, 0) + states.nbytes

    def _drop(self, request: int | None) -> None:
        for kept in (self._states, self._sizes, self._tokens):
            kept.pop(request, None)

    def _bound_memory(self) -> None:
        """Limits running responses to half of the buffer's memory: the shortest are dropped."""
        running = sum(self._sizes.values())
        while running > self.arguments.buffer_bytes // 2:
            shortest = min(self._sizes, key=self._sizes.__getitem__)
            running -= self._sizes[shortest]
            self._drop(shortest)
            self._totals["dropped_running"] += 1
        self._trainer.reserve(running)

    def _collect(self, states: Array, counts: np.ndarray) -> None:
        learnt = [(slot, self._requests.get(slot)) for slot in np.flatnonzero(counts).tolist()]
        learnt = [(slot, request) for slot, request in learnt if request in self._states]
        if not learnt:
            return
        states = to_host(states)  # all slots: selecting some would wait for the next program
        for slot, request in learnt:
            self._keep(request, states[slot, : counts[slot]].copy())
        self._bound_memory()

    def _add(self, prompt: int, tokens: list[int], parts: list[np.ndarray]) -> None:
        """Adds a complete response without its last token, which the policy has not read."""
        known = len(tokens) - 1
        states = np.concatenate(parts)[:known]  # a stop string may have cut the response
        self._trainer.add(np.asarray(tokens[:known], np.int32), states, np.arange(known) >= prompt)

    def train(self) -> bool:
        """Runs one slice; returns False when the slices, the data or the time of this step are used up."""
        if not self.arguments.train or self._delegated or self._slices >= self.arguments.slices:
            return False
        if not self._update_is_ready:
            return False
        if self._step % self.arguments.train_every:
            return False
        if self.train_below > 0 and not self._budget.allows():
            return False
        start = time.perf_counter()
        if self._trainer.slice(self._shared) is None:
            return False
        self._slices += 1
        self._budget.spend(time.perf_counter() - start)
        return True


def _warn(failure: CheckpointError) -> None:
    warnings.warn(f"{failure}; the run goes on, and the next one is tried as usual", stacklevel=2)


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """Turns a failed save into a DrafterError, so that it is not taken for a failed checkpoint of the run."""
    try:
        yield
    except CheckpointError as error:
        raise DrafterError(f"speculation.args.save_dir: {error}") from error


@dataclasses.dataclass(frozen=True)
class PrefilledHead:
    """Prompts that the head has prefilled.

    Attributes:
      state: one slot for each prompt.
      states: [N, T, S, d], the policy's features, on the host; None if nothing is trained on them.
      sizes: tokens of each prompt.
    """

    state: DrafterState
    states: np.ndarray | None
    sizes: tuple[int, ...]
