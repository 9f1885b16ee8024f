"""Training a head beside the policy, one small update at a time: TLT's Spot Trainer (section 4.2).

An idle device trains for a moment and stops after any update (`slice`), so nothing waits for more than one:

    trainer.begin_step(step)
    trainer.add(tokens, states, response_mask)       # whenever a response has finished
    while idle: trainer.slice(shared_params(policy_params, policy_config))
    drafter_params = trainer.params                  # for the next rollout

**Order.** The buffer's sequences (`drafters/eagle/data.py`) in its order, each once before any is repeated.
Sequences that are added in between join the current round, and each step begins a new one.

**Long sequences.** A sequence longer than a packed row is cut into windows: the policy's features depend on
all earlier tokens already, so a window needs nothing from before it. In a window the head works as one that
begins to draft in the middle of a response (`drafters/eagle/drafting.py`): it sees no earlier pairs, and
positions count from 0. Windows overlap so that every start has all of its unrolled steps in one of them; the
few starts at a seam with steps in both count twice. Positions beyond a row are never trained: make rows as
long as the longest responses.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from drafters.eagle.data import DataBuffer, HeadSequence, PackedRows, pack_next, windows
from drafters.eagle.head_state import TrainerState, check_same, named_leaves
from drafters.eagle.model import Head, HeadConfig
from drafters.eagle.objective import HeadTraining
from drafters.eagle.placement import batch_shardings, head_shardings, shape_of, shared_shardings
from drafters.eagle.states import States
from drafters.eagle.training import Metrics, init_state, train_step
from drafters.eagle.unrolling import HeadBatch
from rljax import target
from rljax.config import OptimizerConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import CheckpointError
from rljax.learning.accumulation import TrainState
from rljax.learning.optimizer import make_optimizer
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics
from rljax.processes import to_host
from rljax.sharding import constrain, replicated_sharding


@dataclasses.dataclass(frozen=True)
class BufferSettings:
    """Settings of the buffer; see `DataBuffer`.

    Attributes:
      max_bytes: host memory that it may take.
      dtype: dtype of the stored features.
      previous_share: share of the tokens that comes from the step before.
    """

    max_bytes: int = 1 << 30
    dtype: str = "bfloat16"
    previous_share: float = 0.5


@functools.cache
def head_optimizer(learning_rate: float, clip_norm: float = 0.5) -> optax.GradientTransformation:
    """Returns EAGLE's optimizer: AdamW with betas 0.9 and 0.95 and clipped gradients. The learning rate is
    constant, since the number of updates depends on idle time; the authors use 3e-5 for models of billions of
    weights.
    """
    settings = OptimizerConfig(learning_rate=learning_rate, beta2=0.95, clip_norm=clip_norm)
    return make_optimizer(settings, 1)


class HeadTrainer(TrainerState):
    """A head in training, with its buffer and optimizer.

    Args:
      head: the head's shape.
      training: losses and unrolled steps.
      optimizer: for example `head_optimizer(...)`.
      rope: `rope_table(head.policy, length)`, float32 [at least pack_length + training.steps - 1, 2, D/2].
      numerics: see `Numerics`.
      buffer: settings of the buffer.
      pack_length: tokens in a packed row.
      rows: packed rows in an update. Every update has this shape, and is compiled once.
      seed: seed of the training order.
      params: the head's first weights; copied.
      pool: compiled programs; may be shared with other trainers and with the policy. None makes a new one.
      mesh: the policy's devices; None for one. The head and its moments are split as the policy's are.
    """

    saved_with = "the policy, head and optimizer"

    def __init__(
        self,
        head: HeadConfig,
        training: HeadTraining,
        optimizer: optax.GradientTransformation,
        rope: Array | np.ndarray,
        numerics: Numerics,
        buffer: BufferSettings,
        pack_length: int,
        rows: int,
        seed: int,
        params: Params,
        pool: ExecutablePool | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        longest = pack_length + training.steps - 1
        if len(rope) < longest:
            raise ValueError(f"rope: {len(rope)} positions, but {training.steps} steps need {longest}")
        if pack_length <= training.steps + 1:
            raise ValueError(f"pack_length: {pack_length} is too short for {training.steps} steps")
        self.head = head
        self.pack_length = pack_length
        self.rows = rows
        self._training = training
        self._update = HeadUpdate(head, training, optimizer, numerics, mesh)
        self._mesh = mesh
        self._rope = jnp.asarray(rope)
        if mesh is not None:
            self._rope = target.put(self._rope, replicated_sharding(mesh))
        self._state = self._placed(init_state(params, optimizer))
        state_shape = (head.states, head.policy.hidden_size)
        self._buffer = DataBuffer(buffer.max_bytes, state_shape, buffer.dtype, buffer.previous_share)
        self._dtype = np.dtype(buffer.dtype)
        self._seed = seed
        self._passes = 0
        self._trained: set[int] = set()  # numbers of the sequences of this round so far
        self._skipped = 0
        self._pool = ExecutablePool(numerics.row_invariant) if pool is None else pool
        self._step_metrics: dict[str, float] = {}
        self._reset_metrics()

    def begin_step(self, step: int) -> None:
        """Begins RL step `step` (see `DataBuffer.begin_step`) and a new round over the sequences."""
        self._buffer.begin_step(step)
        self._begin_pass()
        self._reset_metrics()

    def add(self, tokens: np.ndarray, states: np.ndarray, response_mask: np.ndarray) -> None:
        """Adds a finished sequence of the current step.

        Args:
          tokens: int [n], prompt and response.
          states: [n, S, d], the policy's features (`drafters/eagle/model.py`), on the host.
          response_mask: bool [n], True for tokens of the response.
        """
        for window in windows(len(tokens), self.pack_length, self._training.steps + 1):
            # The first token that a head can predict is its third: without one there is nothing to learn.
            if np.any(response_mask[window][2:]):
                self._buffer.add(tokens[window], states[window], response_mask[window])

    def add_read(self, sequences: Iterable[States]) -> None:
        """Adds sequences with the features of all their tokens, but without the last one of each, which the
        policy has not read when it samples.
        """
        for ids, features, mask in sequences:
            self.add(ids[:-1], features[:-1], mask[:-1])

    def reserve(self, size: int) -> None:
        """Reserves bytes of the buffer for responses that are not finished; see `DataBuffer.reserve`."""
        self._buffer.reserve(size)

    def warm_up(self, shared: Params) -> float:
        """Compiles the update; returns its seconds, measured on an empty batch and a copy of the state."""
        program = self._compiled(shared)
        state = jax.tree.map(jnp.copy, self._state)
        batch = self._placed_batch(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._batch_shape())
        )
        jax.block_until_ready((state, batch))
        start = time.perf_counter()
        jax.block_until_ready(program(state, batch, shared, self._rope))
        return time.perf_counter() - start

    def compile(self, shared: Params) -> None:
        """Compiles the update, in any thread; reads only the shapes of `shared`."""
        self._compiled(jax.tree.map(shape_of, shared))

    def slice(self, shared: Params) -> dict[str, float] | None:
        """Runs one update on the next packed batch and waits for it.

        An update with a non-finite result is skipped and counted (`skipped` is 1 then): a head must not stop
        a run.

        Args:
          shared: the policy's embeddings and LM head (`shared_params`), read only.

        Returns:
          the metrics of `train_step`, `skipped`, `tokens` and `padding` (the share of positions without a
          token); None if the buffer is empty.
        """
        packed = self._next_rows()
        if packed is None:
            return None
        program = self._compiled(shared)
        start = time.perf_counter()
        batch = self._placed_batch(next(packed.batches(self.rows)))
        self._state, metrics = program(self._state, batch, shared, self._rope)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        metrics |= {
            "tokens": float(packed.packing.lengths.sum()),
            "padding": packed.packing.padding_fraction(),
        }
        self._skipped += int(metrics["skipped"])
        self._note(metrics, time.perf_counter() - start)
        return metrics

    def metrics(self) -> dict[str, float]:
        """Returns `slices`, `slice_tokens` and `slice_seconds` of the present step; `loss`, `accept_length`
        and `acceptance/1` of the last slice; the totals `updates`, `skipped`, `refused` (sequences larger
        than the buffer) and `dropped_finished` (sequences dropped because the buffer was full); and the
        present `buffer_sequences` and `buffer_bytes`. With a draft vocabulary, `outside_vocabulary` too: the
        step's targets outside of it, which have no part in the loss.
        """
        return {
            **self._step_metrics,
            "updates": self.updates,
            "skipped": self._skipped,
            "refused": self._buffer.refused,
            "dropped_finished": self._buffer.dropped_finished,
            "buffer_sequences": len(self._buffer),
            "buffer_bytes": self._buffer.bytes,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the arrays of `state` that a `FrozenHead` loads, which are copies."""
        params = named_leaves(self._state.params).items()
        named = {f"train.params.{name}": np.array(leaf) for name, leaf in params}
        return named | {"train.updates": np.asarray(self.updates, np.int64)}

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that continuing with the same bits needs, as flat arrays that are copies."""
        named = {name: np.array(leaf) for name, leaf in to_host(self.trained_leaves()).items()}
        buffer = {f"buffer.{name}": array for name, array in self._buffer.state().items()}
        position = {
            "seed": np.asarray(self._seed, np.int64),
            "passes": np.asarray(self._passes, np.int64),
            "trained": np.asarray(sorted(self._trained), np.int64),
            "skipped": np.asarray(self._skipped, np.int64),
        }
        return named | buffer | position

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays that `state` returned; raises as `load_trained`."""
        check_same(self.trained_leaves(), state, "train.", self.saved_with)
        try:
            self._buffer.load_state(
                {name.removeprefix("buffer."): state[name] for name in state if name.startswith("buffer.")}
            )
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the buffer in the checkpoint of the head: {error}") from error
        self.load_trained(state)
        self._seed, self._passes = int(state["seed"]), int(state["passes"])
        self._skipped = int(state["skipped"])
        self._trained = set(np.asarray(state["trained"]).tolist())
        self._reset_metrics()

    def _begin_pass(self) -> None:
        self._passes += 1
        self._trained.clear()

    def _next_rows(self) -> PackedRows | None:
        if not len(self._buffer):
            return None
        left = self._left()
        if not left:
            self._begin_pass()
            left = self._left()
        packed = pack_next(left, self.pack_length, self.rows)
        self._trained.update(sequence.number for sequence in packed.sequences)
        return packed

    def _left(self) -> list[HeadSequence]:
        drawn = self._buffer.draw(self._seed + self._passes)
        return [sequence for sequence in drawn if sequence.number not in self._trained]

    def _placed(self, state: TrainState) -> TrainState:
        if self._mesh is None:
            return state
        placed: TrainState = target.put(state, head_shardings(state, self.head, self._mesh))
        return placed

    def _placed_batch(self, batch: HeadBatch) -> HeadBatch:
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        placed: HeadBatch = target.put(batch, batch_shardings(batch, self._mesh))
        return placed

    def _batch_shape(self) -> HeadBatch:
        return batch_shape(self.head, self.rows, self.pack_length, self._dtype, self._mesh)

    def _compiled(self, shared: Params) -> Callable[..., tuple[TrainState, Metrics]]:
        return self._update.compiled(self._pool, self._state, self._batch_shape(), shared, self._rope)

    def _reset_metrics(self) -> None:
        self._step_metrics = {"slices": 0, "slice_tokens": 0.0, "slice_seconds": 0.0}

    def _note(self, metrics: dict[str, float], seconds: float) -> None:
        noted = self._step_metrics
        noted["slices"] += 1
        noted["slice_tokens"] += metrics["tokens"]
        noted["slice_seconds"] += seconds
        if "outside_vocabulary" in metrics:
            noted["outside_vocabulary"] = noted.get("outside_vocabulary", 0.0) + metrics["outside_vocabulary"]
        for name in ("loss", "accept_length", "acceptance/1"):
            if math.isfinite(metrics[name]):
                noted[name] = metrics[name]


class HeadSession:
    """A head's training on a worker that has nothing to decode: a `TrainingSession`.

    Only trained arrays are saved: not the policy's embeddings and LM head, and no features, which the next
    worker computes again or gets from those that still have them.

    Args:
      trainer: a new one.
      shared: the policy's embeddings and LM head.
      head: `train.*` of `HeadTrainer.state`, of another session; None begins with the trainer's weights.

    Raises:
      CheckpointError: the arrays belong to another head.
    """

    def __init__(self, trainer: HeadTrainer, shared: Params, head: Mapping[str, np.ndarray] | None) -> None:
        self.add, self.copy = trainer.add_read, trainer.copy
        self.update = functools.partial(trainer.slice, shared)
        if head is not None:
            trainer.load_trained(head)


def batch_shape(
    head: HeadConfig, rows: int, pack_length: int, dtype: np.dtype, mesh: Mesh | None
) -> HeadBatch:
    """Returns the shapes of a batch of the update, with their shardings on a mesh.

    Args:
      head: the head's shape.
      rows, pack_length: packed rows, and their tokens.
      dtype: dtype of the features.
      mesh: devices; None for one.
    """
    shape, d = (rows, pack_length), head.policy.hidden_size
    batch = HeadBatch(
        *[jax.ShapeDtypeStruct(shape, jnp.int32)] * 3,
        jax.ShapeDtypeStruct(shape, jnp.bool_),
        jax.ShapeDtypeStruct((*shape, head.states, d), dtype),
    )
    if mesh is None:
        return batch
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        batch,
        batch_shardings(batch, mesh),
    )


@dataclasses.dataclass(frozen=True)
class HeadUpdate:
    """The program of an update, and what it depends on besides its arguments.

    Attributes:
      config: the head's shape.
      training, optimizer, numerics, mesh: as of `HeadTrainer`.
    """

    config: HeadConfig
    training: HeadTraining
    optimizer: optax.GradientTransformation
    numerics: Numerics
    mesh: Mesh | None

    def compiled(
        self, pool: ExecutablePool, state: TrainState, batch: HeadBatch, shared: Params, rope: Array
    ) -> Callable[..., tuple[TrainState, Metrics]]:
        """Returns the program, which consumes the state.

        Args:
          pool: compiled programs.
          state, batch, shared, rope: arguments of the program, or their shapes: `shared` are the policy's
            embeddings and LM head.
        """
        *static, mesh = (getattr(self, field.name) for field in dataclasses.fields(self))
        dtypes = (batch.states.dtype.name, shared["embed"].dtype.name)
        key = ("head_update", *static, batch.tokens.shape, dtypes, len(rope), mesh)
        return pool.get(key, self._update, (state, batch, shared, rope), donate_argnums=(0,))

    def _update(
        self, state: TrainState, batch: HeadBatch, shared: Params, rope: Array
    ) -> tuple[TrainState, Metrics]:
        """Like `train_step`, but keeps the state if the result is not finite."""
        before, mesh = state, self.mesh
        if mesh is not None:
            # A head is one layer: its weights are gathered once for forward and backward pass (ZeRO-3).
            placement = head_shardings(state, self.config, mesh)
            whole = head_shardings(state.params, self.config, mesh, decoding=True)
            before = state.replace(params=constrain(state.params, whole))
            shared = constrain(shared, shared_shardings(shared, mesh))
        head = Head(before.params, shared, rope, self.config, self.numerics, mesh)
        changed, metrics = train_step(before, batch, head, self.training, self.optimizer)
        changed, skipped = finite_or_unchanged(changed, before, metrics["loss"])
        metrics |= {"skipped": skipped}
        if mesh is None:
            return changed, metrics
        return constrain(changed, placement), constrain(metrics, replicated_sharding(mesh))


def finite_or_unchanged(changed: TrainState, state: TrainState, loss: Array) -> tuple[TrainState, Array]:
    """Returns the state after an update, or the one before where the loss or a weight is not finite: a
    drafter must not stop a run. And 1 where nothing changed, else 0, float32 [].
    """
    finite = jnp.isfinite(loss)
    for leaf in jax.tree.leaves(changed):
        finite &= jnp.all(jnp.isfinite(leaf))
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state)
    return state, 1.0 - finite.astype(jnp.float32)
