"""The tiny run, decoded by workers in this process, is the run without workers, bit for bit: whatever is
lost, late or damaged, and whoever comes and goes.
"""

import numpy as np
import pytest

from rljax.assembly.saved_policy import load_saved_policy
from rljax.cluster.messages import Load
from rljax.errors import ClusterError, ConfigError, NumericsError, PolicyError
from rljax.evaluation import evaluator
from rljax.evaluation.settings import evaluation_config
from rljax.progress import silent_progress
from rljax.run_directory import RunDirectory
from tests.cluster.same_run import differences, run
from tests.cluster.test_drafters import FEW
from tests.cluster.turns import Turns, in_the_middle, local_run, losing
from tests.devices import run_on_devices
from tests.training.tiny_run import ONE_PASS


def test_two_workers_make_the_same_run(world, alone, monkeypatch):
    clustered, _ = local_run(world, "two", monkeypatch)
    assert not differences(alone, clustered)
    steps = clustered.steps
    assert len(steps) == 2
    assert all(line["cluster/workers"] == 2 for line in steps)
    assert all(0 <= line[f"cluster/{name}_share"] <= 1 for line in steps for name in ("busy", "idle"))
    assert not any(line["cluster/restarts"] or line["cluster/migrations"] for line in steps)


@pytest.mark.long  # above, with whole weights; tests/training/test_lora_in_training.py has adapters
def test_workers_decode_with_the_merged_weights_of_an_adapter(world, monkeypatch):
    """The quantized drafter makes its weights anew from them as well."""
    adapter = ("policy.lora={rank: 4, alpha: 8}", "optimizer.learning_rate=1e-2")
    expected = run(world, "adapter_alone", *adapter)
    assert {line["mismatch/logprob_abs_max"] for line in expected.metrics[1:]} == {0.0}
    drafts = (*FEW, "speculation.drafter=quantized")
    clustered, _ = local_run(world, "adapter", monkeypatch, *adapter, *drafts)
    assert not differences(expected, clustered)
    # With weights that the workers did not get, the second step would have had other tokens.
    still = run(world, "adapter_still", *adapter, "optimizer.learning_rate=1e-9")
    assert "step 2: reward/mean" in differences(expected, still)


def test_with_drafts_a_worker_that_dies_and_one_that_hangs_in_mid_rollout(
    world, alone, monkeypatch, verifies_always
):
    """Responses go on elsewhere from the ledger's tokens, and what drafters learned is there as well."""
    trouble, workers = [], {}

    def interfere(fabric):
        """Loses the first worker that is in the middle of a response, once by a crash and once in silence."""
        workers.update(fabric.workers)
        for name, worker in list(fabric.workers.items()):
            if in_the_middle(worker) and worker._rollout > len(trouble) and len(trouble) < 2:
                (fabric.silence if trouble else fabric.kill)(name)
                trouble.append(name)
                return

    clustered, turns = local_run(
        world, "trouble", monkeypatch, "speculation.drafter=srt", *ONE_PASS, interfere=interfere
    )
    assert len(trouble) == 2
    assert not differences(alone, clustered)
    assert [line.split(":")[1].strip() for line in turns.said] == [f"{name} is lost" for name in trouble]
    steps = clustered.steps
    assert sum(line["cluster/restarts"] for line in steps) >= 1
    assert sum(line["cluster/migrations"] for line in steps) >= 1
    assert all(line["speculation/drafted"] > 0 for line in steps)
    last = max(worker._version for worker in workers.values() if worker._version is not None)
    current = [worker for worker in workers.values() if worker._version == last]
    learned = [worker._scheduler.speculator.drafters["srt"].metrics() for worker in current]
    assert any(worker.name not in ("worker-0", "worker-1") for worker in current)
    assert {each["history_tokens"] for each in learned} == {steps[-1]["speculation/history_tokens"]}


def test_workers_lost_as_they_fetch_and_weights_that_come_damaged(world, alone, monkeypatch):
    """One is killed with the weights of a step in flight; to another they come damaged twice."""
    hit, damaged = [], []

    def interfere(fabric):
        for name, worker in list(fabric.workers.items()):
            fetches = any(isinstance(order, Load) and order.version == 1 for order in worker._orders)
            if fetches and not hit:
                hit.append(name)
                fabric.kill(name)
            elif fetches and len(damaged) < 2:
                damaged.append(name)
                honest = worker._get

                def once(reference, honest=honest, worker=worker):
                    value = honest(reference)
                    worker._get = honest
                    first = value[0]
                    value[0] = (*first[:3], first[3] ^ 1)
                    return value

                worker._get = once

    clustered, turns = local_run(world, "fetch", monkeypatch, interfere=interfere)
    assert len(hit) == 1 and damaged
    assert not differences(alone, clustered)
    assert f"cluster: {hit[0]} is lost: it was killed" in turns.said
    assert sum(line.get("cluster/restarts", 0) for line in clustered.metrics) == 1


def test_lost_doubled_late_and_reordered_messages_in_a_run(world, alone, monkeypatch):
    """Every third message is late, every seventh comes twice, every eleventh not at all."""
    count = 0

    def network(data):
        nonlocal count
        count += 1
        if count % 11 == 0:
            return ()
        return (0, 5) if count % 7 == 0 else (count % 4,) if count % 3 == 0 else (0,)

    clustered, _ = local_run(world, "network", monkeypatch, network=network)
    assert not differences(alone, clustered)
    steps = clustered.steps
    assert sum(line["cluster/pieces_late"] for line in steps) > 0


def test_a_run_whose_workers_come_and_go(world, alone, monkeypatch):
    """One worker at first, then three, then one again."""
    desired_in = {}

    def interfere(fabric):
        file = world / "resized" / "run" / "workers"
        rollouts = max((worker._rollout for worker in fabric.workers.values()), default=-1)
        for rollout, desired in ((1, "3"), (3, "1")):
            if rollouts == rollout and rollout not in desired_in:
                desired_in[rollout] = desired
                file.write_text(desired)

    clustered, turns = local_run(world, "resized", monkeypatch, "cluster.workers=1", interfere=interfere)
    assert not differences(alone, clustered)
    assert list(desired_in.values()) == ["3", "1"]
    said = " ".join(turns.said)
    assert "3 workers are kept running from now on" in said
    assert said.count("is let go") == 2
    assert sum(line.get("cluster/restarts", 0) for line in clustered.metrics) == 0


TOOLS = (
    "tools={names: [calculator], opening: '+', closing: '=', answer_opening: '<', answer_closing: '>'}",
    "warm_start.steps=20",
    "algorithm.overlong_buffer=40",
)


def test_workers_lost_in_calls_and_behind_them_change_nothing(world, monkeypatch):
    """One is lost while a response waits for a tool, and one behind an answer."""
    lost = []

    def interfere(fabric):
        for name, worker in list(fabric.workers.items()):
            if worker.loop is None or len(lost) == 2 or worker._rollout <= len(lost):
                continue
            waits = worker.loop.turns.paused
            answered = any(each.tool_answers and each.ending is None for each in worker._keys)
            if answered if lost else waits:
                lost.append(name)
                fabric.kill(name)
                return

    alone = run(world, "tools_alone", *TOOLS)
    assert all(line["tools/calls"] for line in alone.metrics[1:])
    clustered, _ = local_run(world, "tools", monkeypatch, *TOOLS, interfere=interfere)
    assert len(lost) == 2
    changed = [name for name in differences(alone, clustered) if "tools/" not in name]
    assert not changed
    tokens = [[line["tools/tokens"] for line in each.metrics[1:]] for each in (alone, clustered)]
    assert all(ours >= theirs for ours, theirs in zip(tokens[1], tokens[0], strict=True))  # asked again


def test_a_worker_that_samples_another_token_is_found(world, monkeypatch):
    """One worker's last bit of a logprob is another, and a piece of its comes from the other one, too."""
    from rljax.cluster import worker as module

    honest = module.RolloutWorker._pieces_of

    def lies(self, key, response, begin, order):
        pieces = honest(self, key, response, begin, order)
        if self.name == "worker-1" and pieces[0].logprobs:
            first, *rest = pieces[0].logprobs
            bits = np.float32(first).view(np.uint32) ^ np.uint32(1)
            pieces[0] = module.dataclasses.replace(pieces[0], logprobs=(float(bits.view(np.float32)), *rest))
        return pieces

    def interfere(fabric):
        """What worker-1 decodes is decoded by worker-0 as well, from the beginning."""
        one, zero = (fabric.workers.get(f"worker-{i}") for i in (1, 0))
        if one is None or one.loop is None or zero.loop is None or one._rollout != zero._rollout:
            return
        work = [
            (key, response.request, module.LiveResponse(response.request).partial())
            for key, response in one._responses.items()
            if key not in zero._responses
        ]
        if work:
            zero.receive(module.Decode("worker-0", zero._rollout, zero._version, tuple(work), False))

    monkeypatch.setattr(module.RolloutWorker, "_pieces_of", lies)
    with pytest.raises(NumericsError, match=r"workers worker-\d and worker-\d sampled different bits"):
        local_run(world, "lies", monkeypatch, interfere=interfere)


def test_without_any_worker_the_last_step_is_saved(world, alone, monkeypatch):
    """All workers go after the first step and none comes: one line, and the same command goes on."""

    def interfere(fabric):
        if any(worker._version == 1 for worker in fabric.workers.values()):
            for name in list(fabric.workers):
                fabric.silence(name)
            fabric.spawn = lambda name: None

    with pytest.raises(
        ClusterError, match=r"^cluster.patience_seconds: no worker has been there for 3"
    ) as end:
        local_run(
            world,
            "lost",
            monkeypatch,
            "cluster.patience_seconds=3",
            "checkpoint.every=0",
            interfere=interfere,
        )
    assert str(end.value).endswith("; step 1 is saved, and the run goes on from there")
    resumed, _ = local_run(world, "lost", monkeypatch, resumes=True)
    assert not differences(alone, resumed)


def test_what_a_worker_raises_for_the_user_ends_the_run(world, monkeypatch):
    def interfere(fabric):
        for worker in fabric.workers.values():
            if worker.loop is not None:
                worker.loop.step = lambda: (_ for _ in ()).throw(PolicyError("policy: a test's error"))

    with pytest.raises(PolicyError, match=r"^policy: a test's error$"):
        local_run(world, "policy_error", monkeypatch, interfere=interfere)


def test_a_config_that_a_worker_cannot_hold(world, monkeypatch):
    with pytest.raises(ConfigError, match=r"^cluster.mesh: 2 devices, but worker-\d has 1; lower it"):
        local_run(world, "mesh", monkeypatch, "cluster.mesh.data=2", "cluster.numerics=warn")


def evaluate(path, output, *overrides):
    config = evaluation_config(path, None, ("evaluation.samples=2", *overrides))
    evaluator.Evaluator(load_saved_policy(path), config, "heldout", output, silent_progress()).run()
    return (output / "responses.jsonl").read_text()


def test_a_policy_evaluated_by_workers_has_the_same_responses(world, alone, monkeypatch, tmp_path):
    """One is lost in the middle. Only the command line asks for workers, not the config of the run."""
    path, lost = world / "alone" / "run", {}
    here = evaluate(path, tmp_path / "here", "engine.decode_steps_per_sync=1")
    turns = Turns(losing(lost))
    monkeypatch.setattr(evaluator, "cluster_of", turns.cluster_of)
    there = evaluate(path, tmp_path / "there", "engine.decode_steps_per_sync=1", "cluster.workers=2")
    assert lost
    assert here == there
    assert len(here.splitlines()) == 2 * 4

    config = RunDirectory(path).config_path.read_text()
    assert "cluster:" in config
    assert not evaluation_config(path, None, ()).cluster.workers


_RUNS = """
import json, pathlib, sys, types
import pytest
from tests.cluster.same_run import differences, lucky_world
from tests.cluster.turns import local_run, losing

lost = {}
directory = types.SimpleNamespace(mktemp=lambda name: pathlib.Path(sys.argv[1]))
with lucky_world(directory) as world, pytest.MonkeyPatch.context() as patch:
    mesh = ("cluster.mesh.data=2", "engine.row_invariant=warn", "cluster.numerics=warn", "warm_start=null")
    one, _ = local_run(world, "one", patch, *mesh, "cluster.workers=1")
    two, _ = local_run(world, "two", patch, *mesh, interfere=losing(lost, 1))
# Devices that share cores compute other last bits of logprobs from run to run, and so other updates.
tokens = ("step 0: ", "step 1: reward", "step 1: rollout/", "step 1: response")
other = [name for name in differences(one, two) if name.startswith(tokens)]
print("FOUND" + json.dumps([*lost.values(), other]))
"""


@pytest.mark.long  # tests/training/test_loop.py has a run on a mesh; above, with workers
def test_workers_with_two_devices_each(tmp_path):
    assert run_on_devices(_RUNS, 2, tmp_path) == [2, []]
