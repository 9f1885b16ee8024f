"""The plain engine: tokens per second against `generate`."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljax.benchmarking import Row, speed_row
from rljax.engine.engine import DecodeEngine
from rljax.errors import UserError
from rljax.models.config import ModelConfig
from rljax.models.transformer import Params, num_params
from rljax.sampling.distribution import SamplingParams
from rljax.timing import compare, interleave
from workloads import (
    PROMPT_TOKENS,
    SWITCH,
    begun,
    config_of,
    import_reference,
    make_engine,
    make_reference,
    random_prompts,
)

if TYPE_CHECKING:
    import transformers

GREEDY = SamplingParams(temperature=0.0)
_CHECKED_TOKENS = 8


def decode(
    engine: DecodeEngine,
    params: Params,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    room: int | None = None,
) -> np.ndarray:
    """Prefills B prompts and samples `new_tokens` after each: int32 [B, new_tokens]. `room` sizes the cache
    for this many instead, so that a short warm-up compiles the programs of a long run.
    """
    state = begun(engine, params, prompts, new_tokens, new_tokens if room is None else room)
    chunks, done = [], 0
    while done < new_tokens:
        state, result = engine.generate(params, state)
        if not result.steps:
            raise RuntimeError(f"decoding stopped after {done} of {new_tokens} tokens")
        chunks.append(result.tokens[: len(prompts)])
        done += result.steps
    return np.concatenate(chunks, axis=1)


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
        engine = make_engine(config, row_invariant, len(prompts), PROMPT_TOKENS + _CHECKED_TOKENS, GREEDY)
        ours = decode(engine, engine.load_params(params), prompts, _CHECKED_TOKENS)
        if not np.array_equal(ours, theirs):
            raise UserError(
                f"greedy tokens (row_invariant {SWITCH[row_invariant]}) are not those of transformers, "
                f"{ours.tolist()} against {theirs.tolist()}: not the same policy, so nothing was timed"
            )


def decode_rows(name: str, plan: dict[int, tuple[int, int]], dtype: str = "float32") -> list[Row]:
    """Measures tokens per second, prefill included, against `generate` with the same dtype; and the cost of
    row-invariance. The plan has the new tokens of each response and the timed rounds by batch.
    """
    import_reference()
    import torch

    config = config_of(name)
    model, params = make_reference(name)
    check_same_policy(model, config, params)
    model = model.to(getattr(torch, dtype))
    comparisons = (
        ("row_invariant on", "on", "transformers generate", "transformers"),
        ("row_invariant off", "off", "transformers generate", "transformers"),
        ("price of row_invariant", "on", "row_invariant off", "off"),
    )
    rows, kind = [], "" if dtype == "float32" else f"{dtype}/"
    for batch, (new_tokens, repeats) in plan.items():
        prompts = random_prompts(batch, config.vocab_size)
        sides: dict[str, Callable[..., object]] = {}
        for on in (True, False):
            engine = make_engine(config, on, batch, PROMPT_TOKENS + new_tokens, dtype=dtype)
            given = engine, engine.load_params(params), prompts
            sides[SWITCH[on]] = functools.partial(decode, *given, room=new_tokens)
        sides["transformers"] = functools.partial(reference_decode, model, prompts)
        actions: dict[str, Callable[[], object]] = {}
        for side, tokens in sides.items():
            tokens(new_tokens=2)  # compiles and allocates
            actions[side] = functools.partial(tokens, new_tokens=new_tokens)
            actions[f"first token, {side}"] = functools.partial(tokens, new_tokens=1)  # mostly prefill
        seconds = interleave(actions, repeats, warmups=0)
        for what, ours, baseline, theirs in comparisons:
            details = {"params": num_params(config), "batch": batch}
            details |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": new_tokens}
            for prefix, side in (("", ours), ("baseline_", theirs)):
                first = seconds[f"first token, {side}"]
                behind = [whole - begin for whole, begin in zip(seconds[side], first, strict=True)]
                details[f"{prefix}first_token_ms"] = 1e3 * statistics.median(first)
                details[f"{prefix}step_ms"] = 1e3 * statistics.median(behind) / (new_tokens - 1)
            timing, label = compare(seconds[ours], seconds[theirs]), f"{kind}batch {batch}/{what}"
            rows.append(speed_row(f"decode/{name}/{label}", batch * new_tokens, timing, baseline, **details))
    return rows
