"""Packed against padded batches on the lengths of real rollouts (TLT, Figure 17b)."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle.data import HeadSequence, PackedRows, pack
from drafters.eagle.model import HeadConfig, init_head, shared_params
from drafters.eagle.objective import published_training
from drafters.eagle.spot_trainer import head_optimizer
from drafters.eagle.training import init_state, jitted_train_step
from drafters.eagle.unrolling import HeadBatch
from rljax.benchmarking import Row, speed_row
from rljax.config import ExperimentConfig
from rljax.learning.packing import Packing
from rljax.models.rope import rope_table
from rljax.timing import compare, interleave
from rljax.training.drafter_warm_up import PolicyRollouts, WarmUp
from rollout_benchmarks.variants import open_run

_ROWS = 4  # packed rows in a batch; padded ones hold about as many positions
_ROUNDED_TO = 64  # lengths of padded batches, so that few programs are compiled


def packing_rows(config: ExperimentConfig, settings: WarmUp, repeats: int) -> list[Row]:
    """Measures tokens per second of an EAGLE head's updates over the rollouts of one step."""
    training = config.training
    with open_run(config) as (run, _):
        head = HeadConfig("eagle", run.trainer.config)
        sequences = [HeadSequence(*each, step=0) for each in PolicyRollouts(run, head).training(0)]
        order = np.random.default_rng(config.seed).permutation(len(sequences))  # rows come out by length
        sequences = [sequences[i] for i in order]
        lengths = np.asarray([each.length for each in sequences])
        longest = int(lengths.max())
        count = _ROWS * training.pack_length // longest
        batches = {
            "packed": list(pack(sequences, training.pack_length).batches(_ROWS)),
            "padded to the longest": list(padded(sequences, count, longest)),
            "padded to the longest of each batch": list(padded(sequences, count)),
        }
        positions = {name: sum(batch.tokens.size for batch in side) for name, side in batches.items()}
        optimizer = head_optimizer(settings.learning_rate)
        numerics = dataclasses.replace(run.numerics, row_invariant=False)
        shared = shared_params(run.state.params, head.policy)
        rope = jnp.asarray(rope_table(head.policy, training.pack_length))
        state = init_state(init_head(head, run.state.params, config.seed), optimizer)

        def sweep(side: Sequence[HeadBatch]) -> Callable[[], None]:
            def run_all() -> None:
                nonlocal state
                for batch in side:
                    state, metrics = jitted_train_step(
                        state,
                        jax.tree.map(jnp.asarray, batch),
                        shared,
                        rope,
                        head,
                        published_training("eagle"),
                        optimizer,
                        numerics,
                    )
                metrics["loss"].block_until_ready()

            return run_all

        seconds = interleave({name: sweep(side) for name, side in batches.items()}, repeats)
    tokens = int(lengths.sum())
    return [
        speed_row(
            f"packing/against {name}",
            tokens,
            compare(seconds["packed"], seconds[name]),
            name,
            sequences=len(sequences),
            tokens=tokens,
            length_mean=float(lengths.mean()),
            length_max=longest,
            positions=positions["packed"],
            baseline_positions=positions[name],
        )
        for name in list(batches)[1:]
    ]


def padded(sequences: Sequence[HeadSequence], count: int, length: int | None = None) -> Iterator[HeadBatch]:
    """Yields batches of `count` sequences, one per row, padded to the batch's longest or to `length`."""
    for first in range(0, len(sequences), count):
        batch = sequences[first : first + count]
        lengths = np.asarray([sequence.length for sequence in batch], np.int64)
        width = length or -(-int(lengths.max()) // _ROUNDED_TO) * _ROUNDED_TO
        rows = np.arange(len(batch))
        packing = Packing(lengths, rows, np.zeros_like(rows), len(batch), width)
        yield from PackedRows(batch, packing).batches(count)
