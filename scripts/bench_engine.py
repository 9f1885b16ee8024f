"""Speed of the plain engine and of the update: `python scripts/bench_engine.py [--quick] [--only SECTIONS]`.

Both sides run in one process, in alternation, on the same float32 weights and sequences, and are checked to
compute the same thing before anything is timed. `docs/benchmarks.md` says what each row means.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from rljax.algorithms.losses import aggregation_weights
from rljax.benchmarking import (
    Comparison,
    Interference,
    Row,
    command_line,
    compare,
    interleave,
    measure_read_bandwidth,
    num_cores,
    print_table,
    results_console,
    write_results,
)
from rljax.config import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import Assignment, DecodeEngine
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.engine.noise import request_key
from rljax.engine.sampling import SamplingParams
from rljax.errors import UserError
from rljax.models import huggingface
from rljax.models.config import ModelConfig
from rljax.models.numerics import Numerics
from rljax.models.transformer import Params, init_params, num_params
from rljax.training.optimizer import make_optimizer
from rljax.training.packing import TrainingSequence, build_batch, pack_sequences
from rljax.training.update import Trainer

if TYPE_CHECKING:
    import torch
    import transformers

GRPO = AlgorithmConfig(name="dapo")  # clip-higher, token mean, no KL term: one forward pass a side
OPTIMIZER = OptimizerConfig()
UPDATE = TrainingConfig(pack_length=768, rows_per_microbatch=4)
GREEDY = SamplingParams(temperature=0.0)
SWITCH = {True: "on", False: "off"}
_PROMPT_TOKENS = 64
_CHECKED_TOKENS = 8
_MUCH_INTERFERENCE = 0.05
_PACKAGES = ("torch", "transformers")


def _qwen3(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        mlp_size=mlp,
        tie_embeddings=True,
        qk_norm=True,
        max_positions=4096,
    )


POLICIES = {
    "2M": _qwen3(vocab=320, hidden=192, layers=4, heads=6, kv_heads=2, mlp=512),  # the quickstart's
    "25M": _qwen3(vocab=8192, hidden=512, layers=7, heads=8, kv_heads=4, mlp=1536),
    "140M": _qwen3(vocab=32000, hidden=768, layers=18, heads=12, kv_heads=4, mlp=2048),
}


# --- policies ----------------------------------------------------------------------------------------------


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one length, so that neither side pads."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (count, _PROMPT_TOKENS)).tolist()


def import_reference() -> None:
    """Checks that the other side is installed, and makes it as fast and as quiet as it can be."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, and decode and update compare with transformers on PyTorch: "
            "install the dev extra (pip install -e '.[dev]'), or measure --only bandwidth,startup"
        ) from error
    torch.set_num_threads(num_cores())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make_reference(config: ModelConfig, directory: Path) -> "tuple[transformers.PreTrainedModel, Params]":
    """A policy with random weights on both sides: made by transformers, saved, and loaded by us."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.mlp_size,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_epsilon,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    model.save_pretrained(directory)
    loaded = huggingface.load_model_config(directory)
    if loaded != config:
        raise RuntimeError(f"transformers saved {loaded}, not {config}")
    return model, huggingface.load_params(directory, loaded, dtype="float32")


def speed_row(name: str, tokens: int, timing: Comparison, baseline: str, details: dict[str, object]) -> Row:
    """Tokens per second of two sides that `compare` timed on the same tokens."""
    return Row(
        name=name,
        value=tokens / timing.seconds,
        unit="tokens/s",
        baseline=baseline,
        baseline_value=tokens / timing.baseline_seconds,
        ratio=timing.ratio,
        details={"ratio_low": timing.ratio_low, "ratio_high": timing.ratio_high, **details},
    )


# --- decode ------------------------------------------------------------------------------------------------


def make_engine(
    config: ModelConfig,
    row_invariant: bool,
    slots: int,
    length: int,
    sampling: SamplingParams | None = None,
    cache: Path | None = None,
) -> DecodeEngine:
    """A float32 engine without an end-of-sequence token: every response has the length asked for."""
    return DecodeEngine(
        config,
        Numerics(row_invariant, "float32"),
        SamplingParams() if sampling is None else sampling,
        make_buckets(slots, length, row_invariant),
        eos_token_ids=(),
        pool=ExecutablePool(row_invariant, cache),
    )


def decode(
    engine: DecodeEngine,
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    room: int | None = None,
) -> np.ndarray:
    """Prefills B prompts and samples `new_tokens` after each: int32 [B, new_tokens].

    Args:
      room: sizes the cache for this many new tokens instead, so that a short warm-up compiles the programs
        of a long run.
    """
    prefix = engine.prefill(params, prompts)
    state = engine.init_state(len(prompts), len(prompts[0]) + (new_tokens if room is None else room))
    requests = [Assignment(i, i, request_key(0, i), new_tokens) for i in range(len(prompts))]
    state = engine.bulk_insert(prefix, state, requests)
    visits, done = [], 0
    while done < new_tokens:
        state, result = engine.generate(params, state)
        if not result.steps:
            raise RuntimeError(f"decoding stopped after {done} of {new_tokens} tokens")
        visits.append(result.tokens[: len(prompts)])
        done += result.steps
    return np.concatenate(visits, axis=1)


def reference_decode(
    model: "transformers.PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    greedy: bool = False,
) -> np.ndarray:
    """The same by `generate`: int32 [B, new_tokens]. Its default of top_k=50 is off, as it is on our side."""
    import torch
    import transformers

    ids = torch.tensor(prompts)
    options = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=not greedy,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    )
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return out[:, len(prompts[0]) :].to(torch.int32).numpy()


def check_same_policy(model: "transformers.PreTrainedModel", config: ModelConfig, params: Params) -> None:
    """Raises `UserError` unless both sides choose the same greedy tokens, and so are the same policy."""
    prompts = random_prompts(2, config.vocab_size)
    theirs = reference_decode(model, prompts, _CHECKED_TOKENS, greedy=True)
    for row_invariant in (True, False):
        engine = make_engine(config, row_invariant, len(prompts), _PROMPT_TOKENS + _CHECKED_TOKENS, GREEDY)
        ours = decode(engine, params, prompts, _CHECKED_TOKENS)
        if not np.array_equal(ours, theirs):
            raise UserError(
                f"greedy tokens (row_invariant {SWITCH[row_invariant]}) are not those of transformers, "
                f"{ours.tolist()} against {theirs.tolist()}: not the same policy, so nothing was timed"
            )


def time_decoding(
    model: "transformers.PreTrainedModel",
    config: ModelConfig,
    params: Params,
    batch: int,
    new_tokens: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of every round, by side: row_invariant "on" and "off", and "transformers".

    "first token, SIDE" is the time of a single token, which is mostly the prefill's.
    """
    prompts = random_prompts(batch, config.vocab_size)
    actions: dict[str, Callable[[], object]] = {}

    def add(side: str, decode_tokens: Callable[[int], object]) -> None:
        decode_tokens(2)  # compiles and allocates
        actions[side] = lambda: decode_tokens(new_tokens)
        actions[f"first token, {side}"] = lambda: decode_tokens(1)

    for row_invariant in (True, False):
        engine = make_engine(config, row_invariant, batch, _PROMPT_TOKENS + new_tokens)
        add(
            SWITCH[row_invariant],
            lambda count, engine=engine: decode(engine, params, prompts, count, room=new_tokens),
        )
    add("transformers", lambda count: reference_decode(model, prompts, count))
    return interleave(actions, repeats, warmups=0)


def decode_rows(name: str, config: ModelConfig, plan: dict[int, tuple[int, int]]) -> list[Row]:
    """Tokens per second, prefill included, against `generate`; and what row-invariance costs.

    Args:
      name: of the policy.
      plan: by batch, the new tokens of each response and the timed rounds.
    """
    import_reference()
    with tempfile.TemporaryDirectory() as directory:
        model, params = make_reference(config, Path(directory))
    check_same_policy(model, config, params)
    comparisons = (
        ("row_invariant on", "on", "transformers generate", "transformers"),
        ("row_invariant off", "off", "transformers generate", "transformers"),
        ("price of row_invariant", "on", "row_invariant off", "off"),
    )
    rows = []
    for batch, (new_tokens, repeats) in plan.items():
        seconds = time_decoding(model, config, params, batch, new_tokens, repeats)
        for what, ours, baseline, theirs in comparisons:
            timing = compare(seconds[ours], seconds[theirs])
            first, step = first_token_and_step(seconds, ours, new_tokens)
            baseline_first, baseline_step = first_token_and_step(seconds, theirs, new_tokens)
            rows.append(
                speed_row(
                    f"decode/{name}/batch {batch}/{what}",
                    batch * new_tokens,
                    timing,
                    baseline,
                    {
                        "rounds": repeats,
                        "params": num_params(config),
                        "batch": batch,
                        "prompt_tokens": _PROMPT_TOKENS,
                        "new_tokens": new_tokens,
                        "first_token_ms": 1e3 * first,
                        "step_ms": 1e3 * step,
                        "baseline_first_token_ms": 1e3 * baseline_first,
                        "baseline_step_ms": 1e3 * baseline_step,
                    },
                )
            )
    return rows


def first_token_and_step(seconds: dict[str, list[float]], side: str, new_tokens: int) -> tuple[float, float]:
    """Median seconds to a side's first token, and for each one after it."""
    first = seconds[f"first token, {side}"]
    behind = [whole - begin for whole, begin in zip(seconds[side], first, strict=True)]
    return statistics.median(first), statistics.median(behind) / (new_tokens - 1)


# --- bandwidth ---------------------------------------------------------------------------------------------


def step_weight_bytes(config: ModelConfig) -> int:
    """Bytes of float32 weights that a decode step reads: all, but of an untied input embedding only a row."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return 4 * (num_params(config) - unread)


def bandwidth_rows(name: str, config: ModelConfig, steps: int, repeats: int) -> list[Row]:
    """Bytes of weights per second while one response is decoded, against what the machine can read."""
    params = init_params(config, seed=0)
    weight_bytes = step_weight_bytes(config)
    prompts = random_prompts(1, config.vocab_size)
    engines = {
        SWITCH[on]: make_engine(config, on, slots=1, length=_PROMPT_TOKENS + steps + 1)
        for on in (True, False)
    }

    def steps_per_second(engine: DecodeEngine) -> float:
        """Of the decode loop alone: the prompt is in its slot, and the first step is not timed."""
        state = engine.init_state(1, _PROMPT_TOKENS + steps + 1)
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


# --- update ------------------------------------------------------------------------------------------------


def long_tailed_sequences(count: int, vocab_size: int) -> list[TrainingSequence]:
    """Random prompts and responses with log-normal lengths: the longest are several times the median."""
    rng = np.random.default_rng(0)
    longest = UPDATE.pack_length - _PROMPT_TOKENS
    lengths = np.clip(rng.lognormal(np.log(longest / 7), 0.9, count).astype(int), 8, longest)
    weights = aggregation_weights(lengths, GRPO.aggregation)
    return [
        TrainingSequence(
            prompt_ids=rng.integers(0, vocab_size, _PROMPT_TOKENS),
            response_ids=rng.integers(0, vocab_size, length),
            # About what a random policy gives, so that ratios are on both sides of the clip range.
            rollout_logprobs=rng.normal(-np.log(vocab_size), 0.2, length),
            advantage=float(rng.normal()),
            weight=float(weight),
        )
        for length, weight in zip(lengths, weights, strict=True)
    ]


class PackedUpdates:
    """Our side: packs the sequences and updates the policy, again and again."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        sequences: Sequence[TrainingSequence],
        row_invariant: bool,
    ) -> None:
        self._sequences = sequences
        optimizer = make_optimizer(**OPTIMIZER.model_dump(), total_updates=1)
        self._trainer = Trainer(
            config,
            Numerics(row_invariant, "float32"),
            SamplingParams(),
            GRPO,
            UPDATE,
            optimizer,
            ExecutablePool(row_invariant),
        )
        self._state = self._trainer.init(params)
        self.padding = 0.0

    def __call__(self) -> tuple[float, float]:
        """One update: the loss, and the norm of its gradients before clipping."""
        packing = pack_sequences([sequence.length for sequence in self._sequences], UPDATE.pack_length)
        rows = packing.microbatches(UPDATE.rows_per_microbatch)
        self.padding = packing.padding_fraction(rows[-1].stop)
        batches = [build_batch(self._sequences, packing, each) for each in rows]
        self._state, metrics = self._trainer.update(self._state, batches)
        return metrics["loss/policy"], metrics["gradient_norm"]


class PaddedUpdates:
    """The other side, as it is usually written: sorted by length, padded on the right, AdamW on autograd.

    Micro-batches hold as many padded tokens as ours hold packed ones, so sorting leaves little padding.
    """

    def __init__(self, model: "transformers.PreTrainedModel", sequences: Sequence[TrainingSequence]) -> None:
        import torch

        self._model = model.train()
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=OPTIMIZER.learning_rate,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            eps=OPTIMIZER.epsilon,
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )
        self._microbatches: list[list[TrainingSequence]] = []
        budget = UPDATE.rows_per_microbatch * UPDATE.pack_length
        longest = 0
        for sequence in sorted(sequences, key=lambda sequence: -sequence.length):
            if not longest or (len(self._microbatches[-1]) + 1) * longest > budget:
                self._microbatches.append([])
                longest = sequence.length
            self._microbatches[-1].append(sequence)
        padded = sum(len(batch) * batch[0].length for batch in self._microbatches)
        self.padding = 1.0 - sum(sequence.length for sequence in sequences) / padded

    def __call__(self) -> tuple[float, float]:
        """One update: the loss, and the norm of its gradients before clipping."""
        import torch

        total = 0.0
        for batch in self._microbatches:
            loss = self._loss(batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, norm.item()

    def _loss(self, batch: Sequence[TrainingSequence]) -> "torch.Tensor":
        import torch

        shape = (len(batch), batch[0].length)
        ids, attended = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        rollout_logprobs, advantages, weights = (torch.zeros(shape) for _ in range(3))
        for row, sequence in enumerate(batch):
            ids[row, : sequence.length] = torch.as_tensor(
                np.concatenate([sequence.prompt_ids, sequence.response_ids])
            )
            attended[row, : sequence.length] = 1
            response = slice(len(sequence.prompt_ids), sequence.length)
            rollout_logprobs[row, response] = torch.as_tensor(sequence.rollout_logprobs, dtype=torch.float32)
            advantages[row, response] = sequence.advantage
            weights[row, response] = sequence.weight  # 0 elsewhere, which masks
        logits = self._model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        log_ratio = torch.where(weights[:, 1:] > 0, -nll.view(len(batch), -1) - rollout_logprobs[:, 1:], 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - GRPO.clip_low, 1 + GRPO.clip_high)
        surrogate = torch.minimum(ratio * advantages[:, 1:], clipped * advantages[:, 1:])
        return -(weights[:, 1:] * surrogate).sum()


def check_same_update(ours: tuple[float, float], theirs: tuple[float, float], switch: str) -> None:
    """Raises `UserError` unless (loss, gradient norm) agree to float32's accuracy."""
    if not np.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
        raise UserError(
            f"loss and gradient norm of the first update differ, {ours} (row_invariant {switch}) against "
            f"{theirs} in PyTorch: not the same update, so nothing was timed"
        )


def update_rows(name: str, config: ModelConfig, num_sequences: int, repeats: int) -> list[Row]:
    """Tokens of prompt and response per second through an update, batching included, against PyTorch."""
    import_reference()
    with tempfile.TemporaryDirectory() as directory:
        model, params = make_reference(config, Path(directory))
    sequences = long_tailed_sequences(num_sequences, config.vocab_size)
    sides = {SWITCH[on]: PackedUpdates(config, params, sequences, on) for on in (True, False)}
    reference = PaddedUpdates(model, sequences)
    theirs = reference()
    for switch, side in sides.items():
        check_same_update(side(), theirs, switch)
    seconds = interleave({**sides, "PyTorch": reference}, repeats, warmups=0)
    tokens = sum(sequence.length for sequence in sequences)
    response_lengths = [len(sequence.response_ids) for sequence in sequences]
    rows = []
    for switch, side in sides.items():
        timing = compare(seconds[switch], seconds["PyTorch"])
        rows.append(
            speed_row(
                f"update/{name}/row_invariant {switch}",
                tokens,
                timing,
                "PyTorch, transformers",
                {
                    "rounds": repeats,
                    "params": num_params(config),
                    "sequences": num_sequences,
                    "tokens": tokens,
                    "response_length_p75": float(np.percentile(response_lengths, 75)),
                    "response_length_max": max(response_lengths),
                    "padding": side.padding,
                    "baseline_padding": reference.padding,
                },
            )
        )
    return rows


# --- startup -----------------------------------------------------------------------------------------------


def first_step(checkpoint: Path, cache: Path) -> dict[str, float]:
    """What a fresh process does to reach its first decode step; run by `--first-step`."""
    enable_compilation_cache(cache)
    config = huggingface.load_model_config(checkpoint)
    params = huggingface.load_params(checkpoint, config)
    created = time.time()
    engine = make_engine(config, row_invariant=True, slots=8, length=256, cache=cache)
    prefix = engine.prefill(params, random_prompts(8, config.vocab_size))
    state = engine.init_state(8, 256)
    requests = [Assignment(i, i, request_key(0, i), 128) for i in range(8)]
    state = engine.bulk_insert(prefix, state, requests)
    engine.generate(params, state, max_steps=1)
    return {"created": created, "decoded": time.time(), "compiling_seconds": engine.pool.seconds}


def startup_rows(name: str, config: ModelConfig, repeats: int) -> list[Row]:
    """Seconds to the first decode step of a second process, its programs cached, against a first one."""
    runs: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "policy"
        huggingface.save_model(checkpoint, config, init_params(config, seed=0), "float32")
        for repeat in range(repeats):
            command = [
                sys.executable,
                __file__,
                "--first-step",
                str(checkpoint),
                f"{directory}/cache{repeat}",
            ]
            for process in ("first", "second"):
                started = time.time()
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                times = json.loads(output.stdout)
                runs[process].append(
                    {
                        "process start": times["decoded"] - started,
                        "engine creation": times["decoded"] - times["created"],
                        "compiling": times["compiling_seconds"],
                    }
                )

    def seconds(process: str, since: str) -> list[float]:
        return [run[since] for run in runs[process]]

    rows = []
    for since in ("process start", "engine creation"):
        timing = compare(seconds("second", since), seconds("first", since))
        rows.append(
            Row(
                name=f"startup/{name}/{since} to first decode step",
                value=timing.seconds,
                unit="s",
                baseline="empty compilation cache",
                baseline_value=timing.baseline_seconds,
                ratio=timing.ratio,
                details={
                    "params": num_params(config),
                    "rounds": repeats,
                    "ratio_low": timing.ratio_low,
                    "ratio_high": timing.ratio_high,
                    "compiling_s": statistics.median(seconds("second", "compiling")),
                    "baseline_compiling_s": statistics.median(seconds("first", "compiling")),
                },
            )
        )
    return rows


# --- command line ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One call of a section's function.

    Attributes:
      section: what `--only` names.
      what: for the line printed while it runs.
      run: measures.
    """

    section: str
    what: str
    run: Callable[[], list[Row]]


SECTIONS = ("decode", "bandwidth", "update", "startup")


def measurements(quick: bool) -> list[Measurement]:
    """Everything this script measures, in order; `quick` keeps to the small policy and few rounds."""
    tiny, small, large = POLICIES["2M"], POLICIES["25M"], POLICIES["140M"]
    if quick:
        plan = {1: (32, 3), 8: (32, 3), 64: (32, 2)}
        return [
            Measurement("decode", "25M", lambda: decode_rows("25M", small, plan)),
            Measurement("bandwidth", "25M", lambda: bandwidth_rows("25M", small, steps=32, repeats=3)),
            Measurement("update", "2M", lambda: update_rows("2M", tiny, num_sequences=32, repeats=3)),
            Measurement("startup", "25M", lambda: startup_rows("25M", small, repeats=1)),
        ]
    plans = {
        "25M": {1: (128, 7), 8: (128, 5), 64: (128, 3)},
        "140M": {1: (128, 5), 8: (128, 3), 64: (32, 3)},
    }
    return [
        *(
            Measurement("decode", name, lambda name=name, plan=plan: decode_rows(name, POLICIES[name], plan))
            for name, plan in plans.items()
        ),
        Measurement("bandwidth", "140M", lambda: bandwidth_rows("140M", large, steps=64, repeats=7)),
        Measurement("update", "2M", lambda: update_rows("2M", tiny, num_sequences=64, repeats=7)),
        Measurement("update", "25M", lambda: update_rows("25M", small, num_sequences=64, repeats=3)),
        *(
            Measurement("startup", name, lambda name=name: startup_rows(name, POLICIES[name], repeats=3))
            for name in ("25M", "140M")
        ),
    ]


def default_output(quick: bool, only: Sequence[str]) -> Path:
    """Whole runs go to engine.json, others beside it: they must not replace the figures that are cited."""
    name = "-".join(["engine", *(only if set(only) != set(SECTIONS) else ()), *(["quick"] if quick else [])])
    return Path("benchmarks/results") / f"{name}.json"


def _parse_sections(text: str | None) -> tuple[str, ...]:
    if text is None:
        return SECTIONS
    named = text.split(",")
    for section in named:
        if section not in SECTIONS:
            raise UserError(f"--only: {section!r} is not a section; they are {','.join(SECTIONS)}")
    return tuple(section for section in SECTIONS if section in named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_engine.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="the small policy, short responses, few rounds")
    parser.add_argument(
        "--only", metavar="SECTIONS", help=f"some of {','.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: benchmarks/results/engine.json; partial and quick runs write beside it",
    )
    parser.add_argument(
        "--first-step", nargs=2, type=Path, metavar=("CHECKPOINT", "CACHE"), help=argparse.SUPPRESS
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints, and writes what is there after every measurement, in case the run is stopped."""
    only = _parse_sections(arguments.only)
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, PyTorch on the CPU: set JAX_PLATFORMS=cpu to compare them"
        )
    if {"decode", "update"} & set(only):
        import_reference()  # before minutes of other measurements
    output = arguments.output or default_output(arguments.quick, only)
    console, rows = results_console(), []
    chosen = [measurement for measurement in measurements(arguments.quick) if measurement.section in only]
    for measurement in chosen:
        start = time.perf_counter()
        with Interference() as interference:
            measured = measurement.run()
        taken = time.perf_counter() - start
        details = {"section": measurement.section, "interference": interference.share}
        measured = [dataclasses.replace(row, details={**details, **row.details}) for row in measured]
        rows += measured
        print_table(measured, f"{measurement.section}, {measurement.what} ({taken:.0f} s)", console)
        if interference.share is not None and interference.share > _MUCH_INTERFERENCE:
            console.print(
                f"[yellow]other processes took {interference.share:.0%} of the cores; threads that "
                "wait for each other suffer most, above all PyTorch's: repeat on a quiet machine[/yellow]"
            )
        write_results(output, rows, command_line(), _PACKAGES)
    console.print(
        f"ratios above 1 mean that rljax is better; {len(rows)} rows are in {output}", soft_wrap=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.first_step:
        print(json.dumps(first_step(*arguments.first_step)))
        return 0
    try:
        run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
