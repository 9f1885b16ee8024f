"""Evaluates a saved policy: n responses to each problem of a split, judged, and what can be said from them.

Responses and judgements are written as they come (`records.py`); started again, an evaluation goes on, and
with more samples or problems than before it only adds those. The noise of a response follows from seed,
problem and sample alone, and is that of the evaluations inside a run (`rljax/rollout/collector.py`): the same
checkpoint gives the same numbers here and there.
"""

import datetime
import hashlib
import math
import os
import time
from typing import Any

import jax
import numpy as np

from drafters.registry import make_drafters
from rljax.config import ExperimentConfig, check_devices
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.errors import UserError
from rljax.evaluation.judging import check_success
from rljax.evaluation.metrics import (
    Estimate,
    JudgedProblem,
    default_ks,
    difficulty_groups,
    estimates,
    problem_metrics,
    success_part,
)
from rljax.evaluation.records import EvaluationDirectory, ResponseKey
from rljax.models.transformer import Params, num_params
from rljax.provenance import command_line, git_commit, machine_facts
from rljax.rollout.collector import EVALUATION, Collector
from rljax.rollout.records import Completion
from rljax.sharding import make_mesh
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Problem, Split, Task
from rljax.tasks.judging import judge
from rljax.tasks.registry import configured_task
from rljax.training.decoder import make_numerics, make_scheduler, warm_up
from rljax.training.progress import Progress
from rljax.training.saved_policy import SavedPolicy

_JUDGED_TOGETHER = 64  # tasks may judge many responses in parallel


class Evaluator:
    """One evaluation.

    Args:
      saved: the policy.
      config: from `rljax.evaluation.settings.evaluation_config`.
      split: whose problems.
      output: directory of the evaluation's files.
      progress: shows how it gets on.

    Raises:
      UserError: what cannot be evaluated so, before anything is compiled.
    """

    def __init__(
        self,
        saved: SavedPolicy,
        config: ExperimentConfig,
        split: Split,
        output: str | os.PathLike[str],
        progress: Progress,
    ) -> None:
        self.saved, self.config, self.split, self.progress = saved, config, split, progress
        check_devices(config.mesh, jax.device_count())
        self.task: Task = configured_task(config.task, config.seed, progress.message)
        self.samples = config.evaluation.samples
        self.problems = self._problems(config.evaluation.problems)
        self.ks = config.evaluation.pass_at or default_ks(self.samples)
        check_success(self.task, split, config.evaluation)
        self.directory = EvaluationDirectory(output, self._identity())

    def run(self) -> dict[str, Any]:
        """Samples and judges what is missing, and returns what is in results.json."""
        self._sample()
        self._judge_all()
        results = self._results()
        self.directory.write_results(results)
        return results

    # -- what is evaluated -----------------------------------------------------------------------------------

    def _problems(self, wanted: int) -> dict[int, Problem]:
        """The split's first problems by index, each once: a split that ends shows its first ones again."""
        problems: dict[int, Problem] = {}
        seen = set()
        for index in range(wanted):
            problem = self.task.problem(self.split, index)
            if problem.id not in seen:
                seen.add(problem.id)
                problems[index] = problem
        if len(problems) < wanted:
            self.progress.message(
                f"only {len(problems):,} of the first {wanted:,} {self.split} problems are different ones"
            )
        return problems

    def _identity(self) -> dict[str, Any]:
        config = self.config
        rollout = config.rollout.model_dump(exclude={"prompts_per_step", "samples_per_prompt"})
        task = config.task.model_dump(exclude={"reward_workers"})
        data = getattr(self.task, "fingerprint", dict)()
        return {
            "policy": weights_digest(self.saved.policy.params),
            "split": self.split,
            "seed": config.seed,
            **{f"task.{name}": value for name, value in task.items()},
            **({"task.data": data} if data else {}),
            **{f"rollout.{name}": value for name, value in rollout.items()},
            "tools": None if config.tools is None else config.tools.model_dump(),
            "policy.compute_dtype": config.policy.compute_dtype,
            "engine.row_invariant": config.engine.row_invariant,
        }

    @property
    def _keys(self) -> list[ResponseKey]:
        return [(index, sample) for index in self.problems for sample in range(self.samples)]

    # -- sampling --------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        config, policy, log = self.config, self.saved.policy, self.directory.responses
        wanted = self._keys
        missing = [key for key in wanted if key not in log.lines]
        if not missing:
            return
        if config.engine.compilation_cache is not None:
            enable_compilation_cache(config.engine.compilation_cache)
        mesh = make_mesh(config.mesh)
        pool = ExecutablePool(config.engine.row_invariant, config.engine.compilation_cache)
        scheduler = make_scheduler(
            config, policy, make_drafters(config.speculation), make_numerics(config, mesh), pool, mesh
        )
        collector = Collector(
            self.task,
            policy.tokenizer,
            scheduler,
            config.seed,
            config.rollout.max_prompt_length,
            config.rollout.max_response_length,
        )
        everything = collector.requests(self.split, list(self.problems), self.samples, EVALUATION, 0)
        requests = dict(zip(wanted, everything, strict=True))
        if scheduler.speculator is not None and (state := self.saved.drafter_state()):
            scheduler.speculator.load_state(state)
        self.progress.message(f"compiling for a policy of {num_params(policy.config):,} parameters")
        params = scheduler.engine.load_params(policy.params)
        warm_up(scheduler, params, config)
        done, start = len(wanted) - len(missing), time.perf_counter()
        self.progress.stage("evaluate", len(wanted), completed=done, sparse=True)
        # Slots end in bursts: the time of a few responses would say nothing of what is left.
        shown, burst = 0, max(1, len(missing) // 20)

        def show(tokens: int, finished: int) -> None:
            nonlocal shown
            if finished - shown >= burst or shown < finished == len(missing):
                rate = tokens / (time.perf_counter() - start)
                self.progress.step(done + finished, {"tokens_per_second": rate})
                shown = finished
            self.progress.update("decode", f"{tokens:,} tokens, {done + finished:,}/{len(wanted):,} done")

        with log:
            scheduler.run(
                params,
                [requests[key] for key in missing],
                show,
                lambda index, completion: log.append(missing[index], self._response(completion)),
            )
        log.sort()

    def _response(self, completion: Completion) -> dict[str, Any]:
        tokens = completion.response_ids.tolist()
        return {
            "text": self.saved.policy.tokenizer.decode(tokens),
            "finish_reason": completion.finish_reason,
            "logprob": float(completion.logprobs.sum(dtype=np.float64)),
            "tokens": tokens,
        }

    # -- judging ---------------------------------------------------------------------------------------------

    def _judge_all(self) -> None:
        responses, log = self.directory.responses.lines, self.directory.judgements
        wanted = self._keys
        missing = [key for key in wanted if key not in log.lines]
        if not missing:
            return
        done = len(wanted) - len(missing)
        self.progress.stage("judge", len(wanted), completed=done, sparse=True)
        with log:
            for start in range(0, len(missing), _JUDGED_TOGETHER):
                keys = missing[start : start + _JUDGED_TOGETHER]
                answered = [(self.problems[key[0]], responses[key]["text"]) for key in keys]
                for key, each, rewards in zip(keys, answered, judge(self.task, answered), strict=True):
                    numbers = self._finite(key[0], rewards)
                    log.append(key, {"rewards": numbers, "answer": extracted_answer(self.task, *each)})
                self.progress.step(done + start + len(keys), {})
        log.sort()

    def _finite(self, index: int, rewards: dict[str, float]) -> dict[str, float]:
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise UserError(f"task: the reward of problem {self.problems[index].id} has {name} {value}")
        return {name: float(value) for name, value in rewards.items()}

    # -- results ---------------------------------------------------------------------------------------------

    def _results(self) -> dict[str, Any]:
        """JSON values; all but `made_by` follow from the policy and the settings."""
        evaluation = self.config.evaluation
        judgements = self.directory.judgements.lines
        parts = {
            success_part(list(judgements[index, 0]["rewards"]), evaluation.success) for index in self.problems
        }
        values = [self._values(index) for index in self.problems]
        groups = difficulty_groups([problem.difficulty for problem in self.problems.values()])
        return {
            "policy": {"path": str(self.saved.path), "step": self.saved.step},
            "settings": self._identity(),
            "problems": len(self.problems),
            "samples": self.samples,
            "success": " or ".join(sorted(parts)),
            "overall": _as_json(estimates(values)),
            "by_difficulty": [
                {
                    "difficulty": group.name,
                    "low": group.low,
                    "high": group.high,
                    "problems": len(group.members),
                    "metrics": _as_json(estimates([values[index] for index in group.members])),
                }
                for group in groups
            ],
            "made_by": {
                "command": command_line(),
                "commit": git_commit(),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": machine_facts(),
            },
        }

    def _values(self, index: int) -> dict[str, float]:
        """The metrics of one problem."""
        keys = [(index, sample) for sample in range(self.samples)]
        judgements = [self.directory.judgements.lines[key] for key in keys]
        responses = [self.directory.responses.lines[key] for key in keys]
        judged = JudgedProblem(
            self.problems[index].difficulty,
            [each["rewards"] for each in judgements],
            [each["answer"] for each in judgements],
        )
        return problem_metrics(judged, self.ks, self.config.evaluation.success) | {
            "response_length": float(np.mean([len(each["tokens"]) for each in responses])),
            "truncated": float(np.mean([each["finish_reason"] == "length" for each in responses])),
        }


def weights_digest(params: Params) -> str:
    """Names the weights: the same for the same bits under the same names."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _as_json(found: dict[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: {"value": each.value, "low": each.low, "high": each.high} for name, each in found.items()}
