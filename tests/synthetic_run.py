"""Run directories as training leaves them, without any training: for tests of reports."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from rljax.rollout.running import RunningRequests
from rljax.run_directory import RunDirectory
from rljax.speculation.pass_record import PLAIN, Decision

CONFIG = """
seed: {seed}
run_dir: runs/{name}
policy:
  shape: {{hidden_size: 192, num_layers: 4, num_heads: 6}}
task: {{name: chain_arithmetic}}
optimizer: {{learning_rate: {learning_rate}}}
"""
SAMPLE = {
    "problem": "train/17",
    "prompt": "<|im_start|>user\n47a5b8c9=<|im_end|>\n<|im_start|>assistant\n",
    "response": "a5+47=52b8+52=60c9+60=69#69",
    "rewards": {"reward": 1.0, "correct": 1.0, "format": 1.0},
    "tokens": 27,
    "finish_reason": "eos",
}


def write_full_run(
    path: Path,
    steps: int = 40,
    seed: int = 0,
    learning_rate: float = 1e-4,
    response: str = SAMPLE["response"],
    drafts: bool = True,
    mismatch: float = 0.0,
) -> Path:
    """A run with everything in it that a report shows."""
    directory, random = RunDirectory(path), np.random.default_rng(seed)
    config = CONFIG.format(seed=seed, name=path.name, learning_rate=learning_rate)
    directory.config_path.write_text(config, encoding="utf-8")
    session = {
        "date": "2026-11-01T10:00:00+00:00",
        "step": 0,
        "command": f"python scripts/train.py --config configs/quickstart.yaml seed={seed}",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": {"cpu": "A processor", "cores": 2, "accelerator": None},
    }
    directory.sessions_path.write_text(json.dumps(session) + "\n", encoding="utf-8")
    directory.append_metrics({"step": 0, "evaluation/reward": 0.3 + 0.02 * seed, "time/elapsed": 30.0})
    for step in range(1, steps + 1):
        lengths = np.minimum(random.lognormal(3.6, 0.75, 256) + 5, 384).astype(int)
        reward = 0.75 - 0.45 * math.exp(-40 * learning_rate / 1e-4 * step / 800) + 0.03 * random.normal()
        rollout = 8 + 2 * random.random() - (0.08 * step if drafts else 0)
        metrics = {
            "step": step,
            "reward/mean": reward,
            "reward/std": 0.48,
            "reward/standard_error": 0.05,
            **{f"response_length/p{p}": float(np.percentile(lengths, p)) for p in (50, 75, 95)},
            "response_length/mean": float(lengths.mean()),
            "response_length/max": int(lengths.max()),
            "rollout/tokens_per_second": lengths.sum() / rollout,
            "entropy": 0.8 * math.exp(-step / 30) + 0.2,
            "gradient_norm": 0.5 + 0.2 * random.random(),
            "mismatch/logprob_abs_max": mismatch * (1 + random.random()),
            "mismatch/logprob_abs_mean": mismatch / 50,
            "update/padding": 0.06,
            "time/rollout": rollout,
            "time/reward": 0.2,
            "time/logprobs": 0.0,
            "time/update": 4.0,
            "time/step": rollout + 4.5,
            "time/elapsed": 40.0 + 13 * step,
        }
        if drafts:
            metrics["speculation/accept_length"] = 1 + 2.5 * step / steps + 0.2 * random.random()
        if step % 10 == 0 or step == steps:
            metrics["evaluation/reward"] = reward - 0.02
        directory.append_metrics(metrics)
        directory.append_rollout(step, _rollout(lengths, rollout, response, step))
        if drafts:
            directory.append_decisions(step, [dataclasses.asdict(each) for each in _decisions(random)])
    return path


def _rollout(lengths: np.ndarray, seconds: float, response: str, step: int) -> dict:
    running = RunningRequests()
    ends = np.sort(lengths) / lengths.max() * seconds
    for i, end in enumerate(ends):
        running._add(float(end), min(64, len(ends) - i))
    best = SAMPLE | {"response": response, "problem": f"train/{step}", "drafted": [[3, 9], [12, 17]]}
    failed = {"reward": 0.0, "correct": 0.0, "format": 1.0}
    worst = SAMPLE | {"response": "a5+47=53#53", "rewards": failed, "tokens": 11}
    return {
        "lengths": {"bin": 6, "counts": np.bincount((lengths - 1) // 6).tolist()},
        "running": [[list(point) for point in running.points()]],
        "best": [best],
        "worst": [worst],
    }


def _decisions(random: np.random.Generator) -> list[Decision]:
    at, decisions = 0.0, []
    for responses in (16, 12, 8, 4, 2):
        for drafter in ("srt", PLAIN, "eagle"):
            seconds = 0.1 + random.random() / 3
            rows = 0 if drafter == PLAIN else 4 * responses
            plain = 100 * seconds
            tokens = int(plain * (1 if drafter == PLAIN else 1.2 + random.random()))
            turns = max(tokens // (1 if drafter == PLAIN else 3), 1)
            reason = "what promises most"
            accepted = [] if drafter == PLAIN else [int(share * turns) for share in (0.9, 0.6, 0.3, 0.2)]
            seen = (at, 16, responses, drafter, rows, reason, 3, turns, tokens, seconds)
            decisions.append(Decision(*seen, 1.5 * plain, plain, [turns] * len(accepted), accepted))
            at += seconds + 0.02
    return decisions
