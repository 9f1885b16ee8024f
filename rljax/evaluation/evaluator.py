"""Evaluates a saved policy: samples n responses to each problem of a split, scores them, and reports metrics.

Responses and judgements are written as they finish (`records.py`). An evaluation that is started again
continues, and with more samples or problems it only adds the missing ones. The noise of a response depends on
seed, problem and sample alone, as in the evaluations inside a run (`rljax/rollout/collector.py`): both give
the same numbers for a checkpoint. Every line holds a digest of its inputs. If the text of a problem has
changed, its responses are refused; if its answer or the rewards have changed, its responses are scored again.
"""

import contextlib
import datetime
import os
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from drafters.registry import make_drafters
from rljax.assembly.decoding import evaluation_sampling, make_numerics, make_scheduler, numerics_line, warm_up
from rljax.assembly.saved_policy import SavedPolicy
from rljax.assembly.task import configured_task
from rljax.cluster.starting import cluster_of
from rljax.config import ExperimentConfig, check_devices, check_with_workers
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.engine.number_type import with_number_type
from rljax.environments.task import environment_of
from rljax.environments.use import check_environment
from rljax.errors import ConfigError
from rljax.evaluation.judging import check_success
from rljax.evaluation.metrics import (
    Estimate,
    ScoredProblem,
    default_ks,
    difficulty_groups,
    estimates,
    part_names,
    problem_metrics,
    success_part,
)
from rljax.evaluation.problems import asked_digest, distinct_problems, judging_digest, task_settings
from rljax.evaluation.records import EvaluationDirectory, ResponseKey
from rljax.models.digest import weights_digest
from rljax.models.transformer import Params, num_params
from rljax.progress import Progress
from rljax.provenance import command_line, git_commit, machine_facts
from rljax.requests import Completion, Request
from rljax.rollout.collector import EVALUATION, Collector, Scheduler, WantedGroups
from rljax.rollout.episodes import episode_rewards
from rljax.rollout.metrics import tokens_per_second
from rljax.rollout.prompts import Prompts
from rljax.sharding import make_mesh
from rljax.tasks.answers import extracted_answer
from rljax.tasks.base import Split, Task
from rljax.tasks.judging import judge

if TYPE_CHECKING:
    from rljax.cluster.decoder import ClusterDecoder

_JUDGED_TOGETHER = 64  # responses per call; tasks may judge them in parallel


class Evaluator:
    """One evaluation.

    Args:
      config: from `rljax.evaluation.settings.evaluation_config`.
      output: directory of the evaluation's files.
      progress: shows the progress.

    Raises:
      UserError: the evaluation is impossible; raised before anything is compiled.
    """

    def __init__(
        self,
        saved: SavedPolicy,
        config: ExperimentConfig,
        split: Split,
        output: str | os.PathLike[str],
        progress: Progress,
    ) -> None:
        config = with_number_type(config)
        self.saved, self.config, self.split, self.progress = saved, config, split, progress
        check_devices(config.mesh, jax.device_count())
        check_with_workers(config)
        self.task: Task = configured_task(config.task, config.seed, progress.message)
        self._environment = environment_of(self.task)
        self._has_turns = self._environment is not None
        check_environment(config, self.task)
        self.samples = config.evaluation.samples
        longest, leave_out = config.rollout.max_prompt_length, config.rollout.long_prompts == "leave_out"
        self.prompts = Prompts(self.task, saved.policy.tokenizer, longest, leave_out)
        problems = distinct_problems(self.task, split, config.evaluation.problems, progress.message)
        self.problems = self.prompts.fitting(problems, progress.message)
        self.ks = config.evaluation.pass_at or default_ks(self.samples)
        check_success(self.task, split, config.evaluation)
        self._settings, self._judging = self._identity()
        self.directory = EvaluationDirectory(output, self._settings)
        self._check_asked()

    def run(self) -> dict[str, Any]:
        """Samples and scores the missing responses, and returns the contents of results.json."""
        with self.directory:
            self._sample()
            self._judge_all()
            results = self._results()
            self.directory.write_results(results)
        return results

    # -- identity --------------------------------------------------------------------------------------------

    def _identity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings that responses depend on, and the settings that only judgements depend on."""
        config = self.config
        of_steps = {"prompts_per_step", "samples_per_prompt", "long_prompts"}
        rollout = config.rollout.model_dump(exclude=of_steps)
        task, judging = task_settings(config.task)
        settings = {
            "policy": weights_digest(self.saved.policy.params),
            "split": self.split,
            "seed": config.seed,
            **{f"task.{name}": value for name, value in task.items()},
            **{f"rollout.{name}": value for name, value in rollout.items()},
            "tools": None if config.tools is None else config.tools.model_dump(),
            **{f"evaluation.{name}": value for name, value in config.evaluation.sampling_changes.items()},
            **({"environment": config.environment.model_dump()} if self._has_turns else {}),
            "policy.compute_dtype": config.policy.compute_dtype,
            "engine.row_invariant": bool(config.engine.row_invariant),
        }
        return settings, {f"task.{name}": value for name, value in judging.items()}

    def _check_asked(self) -> None:
        lines = self.directory.responses.lines
        for key in self._keys:
            if key in lines and lines[key].get("asked") != asked_digest(self.problems[key[0]]):
                raise ConfigError(
                    f"{self.directory.path} holds responses to another problem {key[0]} than"
                    f" {self.problems[key[0]].id} is now: the data have changed; give another --output, or"
                    " delete that one"
                )

    @property
    def _keys(self) -> list[ResponseKey]:
        return [(index, sample) for index in self.problems for sample in range(self.samples)]

    # -- sampling --------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        config, policy, log = self.config, self.saved.policy, self.directory.responses
        all_keys = self._keys
        missing = [key for key in all_keys if key not in log.lines]
        if not missing:
            return
        # Build the scheduler of the run, and the requests of all responses.
        if config.engine.compilation_cache is not None:
            enable_compilation_cache(config.engine.compilation_cache)
        mesh = make_mesh(config.mesh)
        pool = ExecutablePool(bool(config.engine.row_invariant), config.engine.compilation_cache)
        numerics, invariance = make_numerics(config, policy.config, mesh)
        self.progress.message(numerics_line(config, invariance))
        drafters = make_drafters(config.speculation)
        sampling = evaluation_sampling(config)
        scheduler = make_scheduler(config, policy, drafters, numerics, pool, mesh, task=self.task)
        collector = Collector(
            self.task,
            policy.tokenizer,
            scheduler,
            config.seed,
            self.prompts,
            config.rollout.max_response_length,
        )
        all_requests = collector.requests(
            WantedGroups(self.split, list(self.problems), self.samples, EVALUATION, 0, sampling)
        )
        requests = dict(zip(all_keys, all_requests, strict=True))
        # Load the drafters' state and the weights, and compile.
        if state := self.saved.drafter_state():
            scheduler.speculator.load_state(state)
        with contextlib.ExitStack() as parts:
            cluster = parts.enter_context(cluster_of(config, self.progress.message))
            parts.enter_context(contextlib.closing(scheduler.engine))
            parts.enter_context(scheduler.speculator)
            self.progress.message(f"compiling for a policy of {num_params(policy.config):,} parameters")
            params = scheduler.engine.load_params(policy.params)
            if cluster is None:
                first_prompts = [len(request.prompt_ids) for request in all_requests]
                warm_up(scheduler, params, config, first_prompts=first_prompts)
            else:  # the workers compile
                cluster.build(scheduler, config, policy, invariance)
                cluster.wait()
            with log:
                self._decode(scheduler if cluster is None else cluster, params, requests, missing)
        log.sort()

    def _decode(
        self,
        decoder: "Scheduler | ClusterDecoder",
        params: Params,
        requests: dict[ResponseKey, Request],
        missing: list[ResponseKey],
    ) -> None:
        """Decodes the missing responses, and appends each to the log as it finishes."""
        log, total = self.directory.responses, len(requests)
        done, start = total - len(missing), time.perf_counter()
        self.progress.stage("evaluate", total, completed=done, sparse=True)
        # Responses end in bursts, so a few of them would give a poor estimate of the remaining time.
        shown, burst = 0, max(1, len(missing) // 20)

        def show(tokens: int, finished: int) -> None:
            nonlocal shown
            if finished - shown >= burst or shown < finished == len(missing):
                rate = tokens_per_second(tokens, time.perf_counter() - start)
                self.progress.step(done + finished, {"tokens_per_second": rate})
                shown = finished
            doing = getattr(decoder, "doing", "")  # of workers
            detail = f"{tokens:,} tokens, {done + finished:,}/{total:,} done"
            self.progress.update("decode", f"{detail}, {doing}" if doing else detail)

        decoder.run(
            params,
            [requests[key] for key in missing],
            show,
            lambda index, completion: log.append(
                missing[index], self._response(missing[index][0], completion)
            ),
        )

    def _response(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens = completion.response_ids.tolist()
        line = {
            "asked": asked_digest(self.problems[index]),
            "text": self.saved.policy.tokenizer.response_text(tokens),
            "finish_reason": completion.finish_reason,
            "logprob": float(completion.logprobs.sum(dtype=np.float64)),
            "tokens": tokens,
        }
        if self._environment is not None:
            line["rewards"] = episode_rewards([completion], self._environment.declines)[0]
        return line

    # -- scoring ---------------------------------------------------------------------------------------------

    def _judge_all(self) -> None:
        responses, log = self.directory.responses.lines, self.directory.judgements
        all_keys = self._keys
        by = {index: judging_digest(problem, self._judging) for index, problem in self.problems.items()}
        missing = [key for key in all_keys if key not in log.lines or log.lines[key].get("by") != by[key[0]]]
        if not missing:
            return
        if stale := sum(key in log.lines for key in missing):
            self.progress.message(
                f"the rewards or answers of {stale:,} responses have changed: scoring again"
            )
        done = len(all_keys) - len(missing)
        self.progress.stage("judge", len(all_keys), completed=done, sparse=True)
        with log:
            for start in range(0, len(missing), _JUDGED_TOGETHER):
                keys = missing[start : start + _JUDGED_TOGETHER]
                answered = [(self.problems[key[0]], responses[key]["text"]) for key in keys]
                if self._has_turns:  # rewarded turn by turn, while they were sampled
                    scored = [responses[key]["rewards"] for key in keys]
                else:
                    scored = judge(self.task, answered)
                for key, pair, rewards in zip(keys, answered, scored, strict=True):
                    numbers = {
                        name: None if value is None else float(value) for name, value in rewards.items()
                    }
                    answer = extracted_answer(self.task, *pair)
                    log.append(key, {"by": by[key[0]], "rewards": numbers, "answer": answer})
                self.progress.step(done + start + len(keys), {})
        log.sort()

    # -- results ---------------------------------------------------------------------------------------------

    def _results(self) -> dict[str, Any]:
        """Returns the results as JSON values; all but `made_by` are determined by the policy and settings."""
        evaluation = self.config.evaluation
        parts = {
            success_part(part_names(self._scored(index).rewards), evaluation.success)
            for index in self.problems
        }
        values = [self._values(index) for index in self.problems]
        groups = difficulty_groups([problem.difficulty for problem in self.problems.values()])
        return {
            "policy": {"path": str(self.saved.path), "step": self.saved.step},
            "settings": self._settings | self._judging,
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
        """Returns the metrics of one problem."""
        responses = [self.directory.responses.lines[index, sample] for sample in range(self.samples)]
        scored = self._scored(index)
        return problem_metrics(scored, self.ks, self.config.evaluation.success) | {
            "declined": float(np.mean([rewards["reward"] is None for rewards in scored.rewards])),
            "response_length": float(np.mean([len(response["tokens"]) for response in responses])),
            "truncated": float(np.mean([response["finish_reason"] == "length" for response in responses])),
        }

    def _scored(self, index: int) -> ScoredProblem:
        lines = [self.directory.judgements.lines[index, sample] for sample in range(self.samples)]
        rewards, answers = ([line[name] for line in lines] for name in ("rewards", "answer"))
        return ScoredProblem(self.problems[index].difficulty, rewards, answers)


def _as_json(metrics: dict[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {
        name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        for name, estimate in metrics.items()
    }
