"""The price of exactness here: `engine.row_invariant` on against off, in float32 and in bfloat16.

Plain decode steps, verifying passes, and updates, with the form of products that is exact here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from engine_benchmarks.policies import make_engine, measured_numerics
from engine_benchmarks.update import UPDATE, PackedUpdates, long_tailed_sequences
from rljax.benchmarking import Row, compare, interleave
from rljax.engine.buckets import Buckets
from rljax.engine.draft_tree import DraftTree
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, init_params
from rljax.numerics.rows import Numerics
from rljax.sampling.noise import request_key

_BATCHES, NODES, LENGTH, STEPS = (1, 2, 8, 64), 7, 256, 12
_DTYPES = ("float32", "bfloat16")


def numerics_of_a_run(config: ModelConfig, dtype: str, row_invariant: bool) -> tuple[Numerics, str]:
    """Returns numerics as a run measures them on this device, and a line about them."""
    buckets = Buckets((2, 8, 64), (LENGTH,), tuple(batch * (NODES + 1) for batch in (2, 8, 64)), NODES)
    return measured_numerics(config, Numerics(row_invariant, dtype), buckets, [UPDATE.pack_length])


def decoder(engine: DecodeEngine, params: Params, batch: int) -> Callable[[], object]:
    """An action: `STEPS` plain decode steps of a batch whose caches are half full."""
    prefix = engine.prefill(params, [[5] * (LENGTH // 2)])
    state = engine.init_state(batch, LENGTH)
    slots = [Assignment(0, slot, request_key(0, slot), LENGTH) for slot in range(batch)]
    held = [engine.bulk_insert(prefix, state, slots)]
    start = np.asarray(held[0].lengths).copy()

    def decode() -> None:
        state, result = engine.generate(params, held.pop(), STEPS)
        assert result.steps == STEPS
        held.append(
            state.replace(lengths=jnp.array(start))
        )  # so that every call attends to the same number of keys

    return decode


def verifier(engine: DecodeEngine, params: Params, batch: int) -> Callable[[], object]:
    """An action: one verifying pass over a chain of `NODES` wrong drafts per slot."""
    prefix = engine.prefill(params, [[5] * (LENGTH // 2)])
    state = engine.init_state(batch, LENGTH)
    slots = [Assignment(0, slot, request_key(0, slot), LENGTH) for slot in range(batch)]
    held = [engine.bulk_insert(prefix, state, slots)]
    start, width = np.asarray(held[0].lengths).copy(), held[0].batch
    parents = np.broadcast_to(np.arange(-1, NODES - 1, dtype=np.int32), (width, NODES))
    tree = DraftTree(np.zeros((width, NODES), np.int32), parents.copy(), np.ones((width, NODES), bool))

    def verify() -> None:
        state, pending = engine.verify(params, held.pop(), tree)
        jax.block_until_ready(state.lengths)
        del pending
        held.append(state.replace(lengths=jnp.array(start)))

    return verify


def price_rows(name: str, config: ModelConfig, repeats: int, num_sequences: int) -> list[Row]:
    """Measures tokens per second with exactness on, against off, and against float32."""
    params = init_params(config, seed=0)
    sequences = long_tailed_sequences(num_sequences, config.vocab_size)
    forms: dict[str, str] = {}
    actions: dict[tuple[str, str, bool], Callable[[], object]] = {}
    tokens: dict[str, int] = {}
    for dtype in _DTYPES:
        for on in (True, False):
            exactness, form = numerics_of_a_run(config, dtype, on)
            if on:
                forms[dtype] = form
            for batch in _BATCHES:
                engine = make_engine(config, on, batch, LENGTH, numerics=exactness)
                loaded = engine.load_params(params)
                tokens[f"decode batch {batch}"] = batch * STEPS
                actions[f"decode batch {batch}", dtype, on] = decoder(engine, loaded, batch)
                if batch < 64:
                    tokens[f"verify {batch} x {NODES + 1}"] = batch * (NODES + 1)
                    actions[f"verify {batch} x {NODES + 1}", dtype, on] = verifier(engine, loaded, batch)
            tokens["update"] = sum(sequence.length for sequence in sequences)
            actions["update", dtype, on] = PackedUpdates(config, params, sequences, on, exactness)
    rows = []
    for what, count in tokens.items():
        named = {f"{dtype} {on}": actions[what, dtype, on] for dtype in _DTYPES for on in (True, False)}
        seconds = interleave(named, repeats if what != "update" else max(2, repeats // 3), warmups=1)
        for dtype in _DTYPES:
            timing = compare(seconds[f"{dtype} True"], seconds[f"{dtype} False"])
            details = {
                "ratio_low": timing.ratio_low,
                "ratio_high": timing.ratio_high,
                "against_float32": compare(seconds[f"{dtype} True"], seconds["float32 True"]).ratio,
                "numerics": forms[dtype],
            }
            rows.append(
                Row(
                    f"price/{name}/{dtype}/{what}",
                    count / timing.seconds,
                    "tokens/s",
                    "row_invariant off",
                    count / timing.baseline_seconds,
                    timing.ratio,
                    details,
                )
            )
    return rows
