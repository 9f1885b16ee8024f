"""What weights in blocks are worth: plain steps and verifying passes with them, against whole weights."""

import dataclasses

from engine_benchmarks.policies import make_engine
from engine_benchmarks.price import LENGTH, NODES, STEPS, decoder, numerics_of_a_run, verifier
from rljax.benchmarking import Row, compare, interleave
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MOST_VERIFIED = 4


def block_rows(name: str, config: ModelConfig, repeats: int) -> list[Row]:
    """Measures tokens per second by batch in float32, exact on both sides, against decoding with whole
    weights.
    """
    params = init_params(config, seed=0)
    in_blocks, form = numerics_of_a_run(config, "float32", True)
    whole = dataclasses.replace(
        in_blocks, measured_form=dataclasses.replace(in_blocks.product_form, blocks=())
    )
    rows = []
    for batch in _BATCHES:
        engines = {
            side: make_engine(config, True, batch, LENGTH, numerics=numerics)
            for side, numerics in (("blocks", in_blocks), ("whole", whole))
        }
        loaded = {side: engine.load_params(params) for side, engine in engines.items()}
        work = {f"decode batch {batch}": (batch * STEPS, decoder)}
        if batch <= _MOST_VERIFIED:
            work[f"verify {batch} x {NODES + 1}"] = (batch * (NODES + 1), verifier)
        for what, (tokens, make_action) in work.items():
            actions = {side: make_action(engine, loaded[side], batch) for side, engine in engines.items()}
            seconds = interleave(actions, repeats, warmups=1)
            timing = compare(seconds["blocks"], seconds["whole"])
            details = {
                "rounds": repeats,
                "ratio_low": timing.ratio_low,
                "ratio_high": timing.ratio_high,
                "numerics": form,
            }
            rows.append(
                Row(
                    f"blocks/{name}/float32/{what}",
                    tokens / timing.seconds,
                    "tokens/s",
                    "whole weights",
                    tokens / timing.baseline_seconds,
                    timing.ratio,
                    details,
                )
            )
    return rows
