"""Bytes of weights that the decode loop reads per second, against what the machine can read."""

import statistics
import time

from engine_benchmarks.policies import PROMPT_TOKENS, SWITCH, make_engine, random_prompts
from rljax.benchmarking import Row, measure_read_bandwidth
from rljax.engine.engine import DecodeEngine
from rljax.engine.host_sync import Assignment
from rljax.models.config import ModelConfig
from rljax.models.transformer import init_params, num_params
from rljax.sampling.noise import request_key


def step_weight_bytes(config: ModelConfig) -> int:
    """Returns the bytes of float32 weights that a decode step reads: all, except for an untied input
    embedding, of which it reads a row.
    """
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return 4 * (num_params(config) - unread)


def bandwidth_rows(name: str, config: ModelConfig, steps: int, repeats: int) -> list[Row]:
    """Measures bytes of weights per second while one response is decoded, against the machine's bandwidth."""
    weight_bytes = step_weight_bytes(config)
    prompts = random_prompts(1, config.vocab_size)
    engines = {
        SWITCH[on]: make_engine(config, on, slots=1, length=PROMPT_TOKENS + steps + 1) for on in (True, False)
    }

    weights = {engine: engine.load_params(init_params(config, seed=0)) for engine in engines.values()}

    def steps_per_second(engine: DecodeEngine) -> float:
        """Measures the decode loop alone: the prompt is in its slot, and the first step is not timed."""
        params = weights[engine]
        state = engine.init_state(1, PROMPT_TOKENS + steps + 1)
        request = Assignment(row=0, slot=0, noise_key=request_key(0, 0), max_response=steps + 1)
        state = engine.insert(engine.prefill(params, prompts), state, request)
        state, _ = engine.generate(params, state, max_steps=1)
        done, start = 0, time.perf_counter()
        while done < steps:
            state, result = engine.generate(params, state)
            done += result.steps
        return done / (time.perf_counter() - start)

    for engine in engines.values():
        steps_per_second(engine)
    rates: dict[str, list[float]] = {switch: [] for switch in engines}
    readings: list[dict[str, float]] = []
    for _ in range(repeats):  # a round: the machine's bandwidth, then both engines
        readings.append(measure_read_bandwidth(repeats=3))
        for switch, engine in engines.items():
            rates[switch].append(steps_per_second(engine) * weight_bytes)
    machine = [max(reading.values()) for reading in readings]
    methods = {method: max(reading[method] for reading in readings) for method in readings[0]}
    rows = []
    for switch, rate in rates.items():
        shares = [ours / readable for ours, readable in zip(rate, machine, strict=True)]
        rows.append(
            Row(
                name=f"bandwidth/{name}/batch 1/row_invariant {switch}",
                value=statistics.median(rate) / 1e9,
                unit="GB/s",
                baseline="read bandwidth",
                baseline_value=statistics.median(machine) / 1e9,
                ratio=statistics.median(shares),
                details={
                    "params": num_params(config),
                    "weight_bytes": weight_bytes,
                    "rounds": repeats,
                    "ratio_low": min(shares),
                    "ratio_high": max(shares),
                    "best_over_best": max(rate) / max(machine),
                    "read_bandwidth_by_method": {
                        method: reading / 1e9 for method, reading in methods.items()
                    },
                },
            )
        )
    return rows
