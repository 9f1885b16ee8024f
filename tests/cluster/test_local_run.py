"""The tiny run, decoded by two workers in this process, is the run without workers, bit for bit."""

import numpy as np
import pytest

from rljax.errors import ClusterError, NumericsError, PolicyError
from tests.cluster.same_run import differences, run
from tests.cluster.test_drafters import FEW
from tests.cluster.turns import in_the_middle, local_run

DRAFTS = ("speculation.drafter=srt", "speculation.verify_buckets=[16]", "speculation.max_drafts=3")


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

    clustered, turns = local_run(world, "trouble", monkeypatch, *DRAFTS, interfere=interfere)
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
