"""The training loop: from a config to a finished run. Read it from top to bottom.

A step rolls out groups of responses with the current policy, rewards them, and updates the policy on them:
GRPO (arXiv 2402.03300) or DAPO (arXiv 2503.14476), as `algorithm` says. A run that is started again continues
from its newest checkpoint, with the same numbers.
"""

import functools
import signal
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.base import Drafter, Outcome
from drafters.registry import make_drafters, rehearse_drafters, states_read
from rljax.algorithms.advantages import group_relative_advantages
from rljax.algorithms.dynamic_sampling import DynamicSampler
from rljax.algorithms.losses import aggregation_weights
from rljax.algorithms.reward_shaping import soft_overlong_punishment
from rljax.config import CheckpointConfig, ExperimentConfig, check_devices
from rljax.engine.buckets import make_buckets
from rljax.engine.engine import DecodeEngine
from rljax.engine.executables import ExecutablePool, enable_compilation_cache
from rljax.engine.sampling import SamplingParams
from rljax.errors import CheckpointError, ConfigError, Interrupted
from rljax.kernels.switch import KernelChoice
from rljax.models.numerics import Numerics
from rljax.models.transformer import Params, num_params
from rljax.rollout.calibration import calibration_key, load_calibration
from rljax.rollout.collector import EVALUATION, TRAINING, Collector, Group, Timing
from rljax.rollout.manager import strategy_choice
from rljax.rollout.records import DecodeStatistics, Request, accumulate
from rljax.rollout.roofline import Roofline
from rljax.rollout.run_ahead import RunAhead
from rljax.rollout.scheduler import Scheduler
from rljax.rollout.speculation import Speculator
from rljax.rollout.stop_strings import StopStrings
from rljax.sharding import make_mesh, row_multiple
from rljax.tasks.epochs import EpochTask
from rljax.tasks.registry import make_task
from rljax.training.checkpoint import RunCheckpoints
from rljax.training.interruption import StopRequest
from rljax.training.optimizer import make_optimizer
from rljax.training.packing import PackedBatch, TrainingSequence, build_batch, pack_sequences
from rljax.training.policy import check_policy, grown_policy, make_policy
from rljax.training.progress import Progress
from rljax.training.run_directory import RunDirectory
from rljax.training.update import Trainer
from rljax.training.warm_start import warm_start


def run(config: ExperimentConfig, allow_changes: bool = False) -> None:
    """Trains as `config` says, resuming `config.run_dir` if it holds a checkpoint.

    Args:
      config: the experiment.
      allow_changes: go on also where that changes the experiment of the run that is resumed.

    Raises:
      UserError: what the user can mend, in one line.
      Interrupted: a signal asked to stop; what was finished is saved.
    """
    check_devices(config.mesh, jax.device_count())
    if config.engine.compilation_cache is not None:
        enable_compilation_cache(config.engine.compilation_cache)
    start = time.perf_counter()
    progress, directory = Progress(), RunDirectory(config.run_dir)
    with directory.locked(), StopRequest(progress.message, first=None) as stop:
        changes = directory.begin(config, allow_changes)
        checkpoints = open_checkpoints(directory, config.checkpoint)
        try:
            with progress:
                for change in changes:
                    progress.message(f"changed since the last start: {change}")
                TrainingRun(config, directory, checkpoints, progress, start, stop).train()
        except KeyboardInterrupt:
            if stop.signal is None or stop.insisted:
                raise
            step = checkpoints.latest_step()
            where = "before the first checkpoint" if step is None else f"at step {step}, which is saved"
            raise Interrupted(f"stopped {where}", stop.signal) from None
        finally:
            checkpoints.close()


def open_checkpoints(directory: RunDirectory, config: CheckpointConfig) -> RunCheckpoints:
    """A run's checkpoints, kept as its config says."""
    kept = (config.keep, config.keep_every, config.keep_best)
    return RunCheckpoints(directory.checkpoints_path, *kept)


class TrainingRun:
    """Everything a run holds between steps."""

    def __init__(
        self,
        config: ExperimentConfig,
        directory: RunDirectory,
        checkpoints: RunCheckpoints,
        progress: Progress,
        start: float,
        stop: StopRequest | None = None,
    ) -> None:
        self.config, self.directory, self.start = config, directory, start
        self.stop = StopRequest(progress.message) if stop is None else stop
        self.checkpoints, self.progress = checkpoints, progress
        rollout, engine = config.rollout, config.engine
        mesh = make_mesh(config.mesh)
        kernels = KernelChoice(**config.kernels.model_dump())
        if mesh is not None:
            kernels = kernels.on_mesh()
        self.numerics = Numerics(engine.row_invariant, config.policy.compute_dtype, kernels)
        self.pool = ExecutablePool(engine.row_invariant, engine.compilation_cache)
        task = make_task(config.task.name, config.seed, **config.task.args)
        if config.task.problems:
            task = EpochTask(task, config.task.problems)
        speculation = config.speculation
        drafters = make_drafters(speculation)
        policy = make_policy(config, task, directory.path / "tokenizer")
        progress.message(f"policy: {num_params(policy.config):,} parameters")
        check_policy(config, policy, task)
        if config.warm_start is not None:
            shared = (self.numerics, self.pool, mesh, progress)
            policy = warm_start(config, policy, task, *shared, directory.warm_start_path, self.stop)
        if config.policy.growth is not None:
            policy = grown_policy(policy, config.policy.growth, config.seed)
            progress.message(f"grown to {num_params(policy.config):,} parameters")
        sampling = SamplingParams(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)
        self.engine = DecodeEngine(
            policy.config,
            self.numerics,
            sampling,
            make_buckets(
                engine.max_slots,
                rollout.max_prompt_length + rollout.max_response_length,
                engine.row_invariant,
                engine.batch_buckets,
                engine.cache_buckets,
                row_multiple(mesh),
                speculation.verify_buckets if drafters else (),
                speculation.max_drafts,
            ),
            policy.eos_token_ids,
            engine.decode_steps_per_visit,
            self.pool,
            mesh,
            engine.verification,
            states_read(drafters, policy.config, policy.tokenizer),
        )
        self.speculator, self.run_ahead = None, None
        if drafters:
            if speculation.run_ahead_below:
                self.run_ahead = RunAhead(speculation.run_ahead_below, speculation.run_ahead_share)
            self.speculator = Speculator(
                self.engine,
                drafters,
                speculation.max_batch,
                self.run_ahead,
                strategies=strategy_choice(speculation, config.seed, self.roofline(drafters)),
            )
        stop = StopStrings(rollout.stop, policy.tokenizer.decode) if rollout.stop else None
        self.collector = Collector(
            task,
            policy.tokenizer,
            Scheduler(self.engine, engine.max_slots, stop, self.speculator, speculation.overlap),
            config.seed,
            rollout.max_prompt_length,
            rollout.max_response_length,
        )
        updates_per_step = config.training.minibatches_per_step * config.training.epochs_per_step
        optimizer = make_optimizer(
            **config.optimizer.model_dump(), total_updates=config.training.steps * updates_per_step
        )
        self.trainer = Trainer(
            policy.config,
            self.numerics,
            sampling,
            config.algorithm,
            config.training,
            optimizer,
            self.pool,
            mesh,
        )
        self.state = self.trainer.init(policy.params)
        self.reference = None
        if config.algorithm.kl_coefficient > 0:
            self.reference = self.trainer.place(jax.tree.map(jnp.copy, policy.params))
        self.step = 0
        self.data_position = 0  # the next training problem
        self.drafter_state: dict[str, np.ndarray] = {}  # of an earlier session, in a run without a drafter

    def roofline(self, drafters: dict[str, Drafter]) -> Roofline | None:
        """The device's constants, where the rollout manager predicts from them."""
        speculation = self.config.speculation
        if speculation.choice != "roofline":
            return None
        key = calibration_key(
            self.engine.config,
            self.engine.numerics,
            drafters["quantized"].format,
            self.config.mesh.num_devices,
        )
        found = load_calibration(speculation.calibration_dir, key)
        if found is None:
            raise ConfigError(
                f"speculation.choice: roofline finds no constants of this policy and device in"
                f" {speculation.calibration_dir}; run scripts/calibrate.py with this config first"
            )
        return found.roofline

    def train(self) -> None:
        config = self.config
        self.resume()
        self.directory.write_config(config, allow_changes=True)  # `run` has asked about them
        self.directory.record_session(self.step)
        self.compile()
        if self.step == 0:
            self.write_metrics(self.evaluate())
        with self.stop.finish_first("this step"):
            while self.step < config.training.steps:
                stopped_by = self.advance(self.stop)
                if stopped_by is not None and self.step < config.training.steps:
                    self.checkpoints.wait()
                    raise Interrupted(f"stopped at step {self.step}, which is saved", stopped_by)
            self.checkpoints.wait()
        self.report()

    def compile(self, late_inserts: bool = False) -> None:
        """Every program that the run needs; `late_inserts`: see `DecodeEngine.warm_up`."""
        config = self.config
        self.progress.message("compiling")
        params = self.engine.load_params(self.state.params)
        self.engine.warm_up(
            params,
            config.engine.max_slots,
            config.rollout.max_prompt_length,
            late_inserts or self.run_ahead is not None,
        )
        if self.speculator is not None:
            rehearse_drafters(config.speculation)
            self.speculator.warm_up(params, config.rollout.max_prompt_length)
        self.trainer.warm_up(self.state, reference=self.reference is not None)

    def advance(self, stop: StopRequest) -> signal.Signals | None:
        """One step, with all that is due after it: progress, evaluation, metrics, checkpoint.

        Returns the signal that asked to stop, if one came before the state was saved.
        """
        config, progress = self.config, self.progress
        progress.stage("train", config.training.steps, completed=self.step)
        if self.speculator is not None:
            self.speculator.decisions.take()  # those of evaluation are nobody's
        metrics = self.training_step()
        decisions = [] if self.speculator is None else self.speculator.decisions.take()
        self.step += 1
        progress.step(
            self.step,
            {
                "reward": metrics["reward/mean"],
                "tokens_per_second": metrics["rollout/tokens_per_second"],
                "length": metrics["response_length/mean"],
            },
        )
        last = self.step == config.training.steps
        if last or (config.evaluation.every and self.step % config.evaluation.every == 0):
            metrics |= self.evaluate()
        self.write_metrics(metrics)
        if self.speculator is not None:
            self.directory.append_decisions(self.step, decisions)
        due = config.checkpoint.every and self.step % config.checkpoint.every == 0
        score = metrics.get("evaluation/reward")
        due = due or (config.checkpoint.keep_best and score is not None)
        stopped_by = stop.signal
        final = last or stopped_by is not None
        self.checkpoint(bool(due or final), final, score)
        return stopped_by

    def checkpoint(self, due: bool, final: bool, score: float | None) -> None:
        """Begins a checkpoint if one is due, and tells of the last one if that has failed. A `final` one must
        not; others as `checkpoint.on_failure` says.
        """
        save = functools.partial(self.save, score)
        for attempt in (self.checkpoints.wait, save) if due else (self.checkpoints.check,):
            try:
                attempt()
            except CheckpointError as error:
                if self.config.checkpoint.on_failure == "stop" or (final and attempt is save):
                    raise
                self.progress.message(
                    f"warning: {error}; the run goes on, and the next one is tried as usual"
                )

    def save(self, score: float | None) -> None:
        """Starts a checkpoint of all that going on takes; `score` is the held-out reward, if it is known."""
        drafter = self.drafter_state if self.speculator is None else self.speculator.state()
        host_state = {"data_position": self.data_position, "seed": self.config.seed}
        self.checkpoints.save(self.step, self.state, host_state, drafter, score)

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        elapsed = time.perf_counter() - self.start
        self.directory.append_metrics({"step": self.step} | metrics | {"time/elapsed": elapsed})

    def resume(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        if self.checkpoints.latest_step() is None:
            self.directory.truncate_after(-1)
            return
        self.step, self.state, host_state = self.checkpoints.restore(self.state)
        if "data_position" not in host_state:
            path = self.checkpoints.directory / str(self.step)
            raise CheckpointError(f"{path}: is no checkpoint of a training run (it has no data_position)")
        self.data_position = host_state["data_position"]
        drafter_state = self.checkpoints.host_arrays(self.step)
        if self.speculator is None:
            self.drafter_state = drafter_state
        else:
            self.speculator.load_state(drafter_state)
        self.directory.truncate_after(self.step)
        seed = host_state.get("seed", self.config.seed)
        before = "" if seed == self.config.seed else f", which was reached with seed {seed}"
        self.progress.message(f"resumed from step {self.step}{before}")

    # -- one step --------------------------------------------------------------------------------------------

    def training_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        groups, statistics, timing, sampled = self.roll_out(self.engine.load_params(self.state.params))
        minibatches, padding = self.minibatches(groups)
        scoring_start = time.perf_counter()
        references = self.reference_logprobs(minibatches)
        update_start = time.perf_counter()
        update_metrics = self.update(minibatches, references)
        end = time.perf_counter()
        return {
            **_rollout_metrics(groups, sampled, statistics, timing),
            **({} if self.speculator is None else self.speculator.metrics(statistics)),
            **update_metrics,
            "update/padding": padding,
            "engine/compilations": self.pool.compilations,
            "time/rollout": timing.decode,
            "time/reward": timing.reward,
            "time/logprobs": update_start - scoring_start,
            "time/update": end - update_start,
            "time/step": end - start,
        }

    def roll_out(self, params: Params) -> tuple[list[Group], DecodeStatistics, Timing, list[Group]]:
        """The step's groups: one round, or with dynamic sampling as many as it takes. Last, all that was
        sampled.
        """
        config = self.config
        wanted = config.rollout.prompts_per_step
        statistics, timing, sampled = DecodeStatistics(), Timing(), []
        sampler = DynamicSampler(wanted, config.algorithm.dynamic_sampling_max_rounds)
        while True:
            indices = range(self.data_position, self.data_position + wanted)
            self.data_position += wanted
            if self.run_ahead is not None and not sampled and self.step + 1 < config.training.steps:
                self.run_ahead.plan(self.next_requests())
            total = wanted * config.rollout.samples_per_prompt
            groups, round_statistics, round_timing = self.collector.collect(
                params,
                "train",
                indices,
                config.rollout.samples_per_prompt,
                TRAINING,
                self.step,
                functools.partial(self.show_rollout, total),
            )
            sampled += groups
            if self.speculator is not None:
                self.speculator.learn(outcomes(groups))
            accumulate(statistics, round_statistics)
            accumulate(timing, round_timing)
            if not config.algorithm.dynamic_sampling:
                return groups, statistics, timing, sampled
            sampler.offer(groups, np.stack([group.reward for group in groups]))
            if sampler.full:
                return sampler.take(), statistics, timing, sampled

    def next_requests(self) -> list[Request]:
        """What the next step will sample first, if dynamic sampling needs no further round in this one."""
        rollout = self.config.rollout
        indices = range(self.data_position, self.data_position + rollout.prompts_per_step)
        return self.collector.requests("train", indices, rollout.samples_per_prompt, TRAINING, self.step + 1)

    def show_rollout(self, total: int, tokens: int, finished: int) -> None:
        self.progress.update("rollout", f"{tokens:,} tokens, {finished}/{total} done")

    def minibatches(self, groups: list[Group]) -> tuple[list[list[PackedBatch]], float]:
        """The step's responses as mini-batches of packed micro-batches, and the share of padding."""
        config = self.config
        algorithm, training = config.algorithm, config.training
        rewards = np.stack([group.reward for group in groups])  # [P, G]
        completions = [completion for group in groups for completion in group.completions]
        lengths = np.asarray([len(completion.response_ids) for completion in completions])
        if algorithm.overlong_buffer:
            rewards = rewards + soft_overlong_punishment(
                lengths,
                config.rollout.max_response_length,
                algorithm.overlong_buffer,
                algorithm.overlong_penalty,
            ).reshape(rewards.shape)
        advantages = np.asarray(
            group_relative_advantages(
                jnp.asarray(rewards, jnp.float32), normalization=algorithm.advantage_normalization
            )
        ).reshape(-1)
        prompts = [group.prompt_ids for group in groups for _ in group.completions]
        order = np.random.default_rng((config.seed, self.step)).permutation(len(completions))
        minibatches, tokens, positions = [], 0, 0
        for part in np.array_split(order, training.minibatches_per_step):
            weights = aggregation_weights(lengths[part], algorithm.aggregation)
            sequences = [
                TrainingSequence(
                    prompts[i],
                    completions[i].response_ids,
                    completions[i].logprobs,
                    advantage=float(advantages[i]),
                    weight=float(weight),
                )
                for i, weight in zip(part, weights, strict=True)
            ]
            packing = pack_sequences([sequence.length for sequence in sequences], training.pack_length)
            ranges = packing.microbatches(training.rows_per_microbatch, self.trainer.row_multiple)
            minibatches.append([build_batch(sequences, packing, rows) for rows in ranges])
            tokens += int(packing.lengths.sum())
            positions += ranges[-1].stop * training.pack_length
        return minibatches, 1.0 - tokens / positions

    def reference_logprobs(self, minibatches: list[list[PackedBatch]]) -> list[list[np.ndarray] | None]:
        if self.reference is None:
            return [None] * len(minibatches)
        return [self.trainer.score(self.reference, minibatch) for minibatch in minibatches]

    def update(
        self, minibatches: list[list[PackedBatch]], references: list[list[np.ndarray] | None]
    ) -> dict[str, float]:
        """All of the step's updates; metrics averaged over them, but the mismatch is the first one's: only
        that one still has the weights of the rollout, where a row-invariant engine shows 0.
        """
        collected: list[dict[str, float]] = []
        for epoch in range(self.config.training.epochs_per_step):
            for number, (minibatch, reference) in enumerate(zip(minibatches, references, strict=True), 1):
                self.progress.update("update", f"{epoch * len(minibatches) + number}")
                self.state, metrics = self.trainer.update(self.state, minibatch, reference)
                collected.append(metrics)
        first = {name: value for name, value in collected[0].items() if name.startswith("mismatch/")}
        return {
            name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]
        } | first

    # -- evaluation and the end ------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out problems, sampled as in training."""
        problems = self.config.evaluation.problems
        if problems == 0:
            return {}
        self.progress.stage("evaluate", 1)
        groups, statistics, timing = self.collector.collect(
            self.engine.load_params(self.state.params),
            "heldout",
            range(problems),
            1,
            EVALUATION,
            0,  # the same noise at every evaluation: differences come from the policy
            functools.partial(self.show_rollout, problems),
        )
        metrics = {f"evaluation/{name}": value for name, value in _mean_rewards(groups).items()}
        self.progress.message(
            f"step {self.step}: reward {metrics['evaluation/reward']:.3f} on {problems} held-out problems"
        )
        return metrics | {"evaluation/tokens": statistics.tokens, "time/evaluation": timing.decode}

    def report(self) -> None:
        """Says what came out, and where it is."""
        lines = self.directory.read_metrics()
        before = next((line for line in lines if "evaluation/reward" in line), None)
        after = next((line for line in reversed(lines) if "evaluation/reward" in line), None)
        if before is not None and after is not None:
            self.progress.message(
                f"held-out reward: {before['evaluation/reward']:.3f} at step {before['step']}, "
                f"{after['evaluation/reward']:.3f} at step {after['step']}"
            )
        self.progress.message(f"results: {self.directory.path} (config.yaml, metrics.jsonl, checkpoints/)")


def outcomes(groups: Sequence[Group]) -> list[Outcome]:
    """Rewarded responses as drafters learn from them."""
    return [
        Outcome(group.prompt_ids, completion.response_ids, float(reward))
        for group in groups
        for completion, reward in zip(group.completions, group.reward, strict=True)
    ]


def _mean_rewards(groups: list[Group]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards]
    return {name: float(np.mean([reward[name] for reward in rewards])) for name in rewards[0]}


def _rollout_metrics(
    groups: list[Group], sampled: list[Group], statistics: DecodeStatistics, timing: Timing
) -> dict[str, float]:
    """Metrics of the rollout; rewards are of everything that was sampled, lengths of what is learned from."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.asarray([len(completion.response_ids) for completion in completions])
    means = _mean_rewards(sampled)
    return {
        "reward/mean": means.pop("reward"),
        **{f"reward/{name}": value for name, value in means.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/p75": float(np.percentile(lengths, 75)),
        "response_length/max": int(lengths.max()),
        "response_length/truncated": float(
            np.mean([completion.finish_reason == "length" for completion in completions])
        ),
        "rollout/groups_sampled": len(sampled),
        "rollout/tokens": statistics.tokens,
        "rollout/tokens_per_second": statistics.tokens / timing.decode,
        "rollout/occupancy": statistics.occupancy,
        "rollout/decode_steps": statistics.steps,
    }
