"""The virtual clock against cases computed by hand, and against decoding token by token."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.histospec import WIDEST, AimdWindows
from rljax.cluster.router import SharedQueue
from rljax.errors import ConfigError
from rljax.models.transformer import init_params
from rljax.planning.passes import pass_work
from rljax.simulation.cluster import Cluster, Machines, Response
from rljax.simulation.command import main
from rljax.simulation.costs import POLICIES, RooflineCosts, TableCosts, planned_costs
from rljax.simulation.drafting import LEVELS, Drafting, SimulatedDrafter, aimd
from rljax.simulation.outcome import outcome_of
from rljax.simulation.scenario import Scenario, Workload, epochs, recorded_lengths
from rljax.simulation.worker import Job, SimulatedWorker
from tests.configs import table

SECOND = RooflineCosts(0.0, 0.0, 0.0, 1.0)  # every pass takes a second


def job(key, total, prompt=0, levels=(), begin=0):
    return Job(key, 1, total, begin, prompt, key, levels)


def ends_of(worker, now=0.0):
    """(key, time) of every end."""
    found = []
    while worker:
        now = worker.next_end()
        found += [(each.key, now) for each in worker.ended(now)]
    return found


def test_requests_wait_for_slots():
    worker = SimulatedWorker("w", 2, SECOND)
    worker.add([job(0, 3), job(1, 5), job(2, 4)], 0.0)
    assert ends_of(worker) == [(0, 3), (1, 5), (2, 7)]
    assert worker.busy == 7


def test_ends_are_seen_when_the_host_looks():
    """While one waits: after four passes, or where two of sixteen slots, an eighth, have come free before."""
    worker = SimulatedWorker("w", 16, SECOND, sync=4)
    worker.add([job(key, total) for key, total in enumerate([3, 6, *[20] * 14, 30])], 0.0)
    assert ends_of(worker)[:3] == [(0, 4), (1, 6), (2, 20)]
    worker = SimulatedWorker("w", 16, SECOND, sync=100)
    worker.add([job(key, total) for key, total in enumerate([3, 6, 9, *[20] * 13, 30, 30])], 0.0)
    assert ends_of(worker)[:3] == [(0, 6), (1, 6), (2, 9)]


def by_tokens(lengths, costs, prompt):
    """Decoded pass by pass; a response that ends leaves at the end of its pass."""
    left, now, ends = dict(enumerate(lengths)), 0.0, {}
    done = dict.fromkeys(left, 0)
    while left:
        cached = sum(prompt + done[key] for key in left)
        now += costs.fixed(len(left)) + costs.cached * cached
        for key in list(left):
            done[key] += 1
            if done[key] == left[key]:
                ends[key] = now
                del left[key]
    return ends


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(0, 50), st.floats(0, 1e-4))
def test_closed_form_is_decoding_token_by_token(lengths, prompt, cached):
    """The cache grows within a pass, too: half a token of each request, on average."""
    costs = RooflineCosts(1e-3, 5e-3, cached, 2e-3)
    worker = SimulatedWorker("w", 99, costs)
    worker.add([job(key, length, prompt) for key, length in enumerate(lengths)], 0.0)
    worker._paused = worker.busy = 0.0  # without the prefill
    slowest = cached * sum(lengths) * len(lengths)
    for key, end in ends_of(worker):
        assert end == pytest.approx(by_tokens(lengths, costs, prompt)[key], abs=slowest + 1e-6)


def test_accepted_drafts_advance_by_level():
    """Windows of one draft: (1 + p) tokens a pass of one second, and half a second to draft."""
    drafting = Drafting(SECOND, {"d": SimulatedDrafter(0.5, base=0.5)}, [1])
    worker = SimulatedWorker("w", 9, SECOND, drafting)
    worker.add([job(0, 30, levels=(LEVELS // 2,)), job(1, 20, levels=(0,))], 0.0)
    assert ends_of(worker) == [(0, pytest.approx(30)), (1, pytest.approx(30))]
    plain = Drafting(SECOND, {"d": SimulatedDrafter(0.5, base=9.0)}, [0, 1])
    assert plain.way(3, "d", 0) == ("plain", 0)
    assert Drafting(SECOND, {"d": SimulatedDrafter(0.5)}, [0, 1], below=2).way(3, "d", 0)[1] == 0


@pytest.mark.parametrize(("acceptance", "misses"), [(0.9, 0), (0.85, 2)])
def test_windows_of_histospec_are_those_of_its_code(acceptance, misses):
    """The stationary distribution in closed form against `AimdWindows`, with drafts accepted at random."""
    random, windows = np.random.default_rng(0), AimdWindows(4000, 2, 2, WIDEST)
    requests, waits = np.arange(4000), np.zeros(4000, int)
    tokens = drafts = 0
    for turn in range(90):
        drafted = np.where(waits > 0, 0, windows[requests])
        accepted = np.minimum(random.geometric(1 - acceptance, 4000) - 1, drafted)
        windows.observe(requests, drafted, accepted)
        waits = np.where(waits > 0, waits - 1, np.where(accepted < drafted, misses, 0))
        if turn >= 30:
            tokens, drafts = tokens + 4000 + accepted.sum(), drafts + drafted.sum()
    assert aimd(acceptance, misses) == pytest.approx((tokens / 240_000, drafts / 240_000), rel=0.02)
    assert aimd(1.0) == (33.0, 32.0)
    # RhymeRL's Fig. 17: 65 to 79 % of drafts, in windows that depend on it; the band and the middle.
    shares = [(tokens - 1) / drafts for tokens, drafts in map(aimd, (0.85, 0.905, 0.95))]
    assert shares == pytest.approx([0.65, 0.72, 0.79], abs=0.01)


def test_a_simulated_policy_has_the_matrices_of_the_policy():
    model = dataclasses.replace(POLICIES["qwen2.5-0.5b"], architecture="qwen3", num_layers=2, vocab_size=64)
    params = init_params(model, 0)
    matrices = [*params["layers"][0].values(), *params["layers"][1].values(), params["embed"]]
    assert pass_work(model).products == sum(each.size for each in matrices if each.ndim == 2)
    work = pass_work(model)(3.0, 10.0, 5.0)
    assert work.flops == 2 * 3 * pass_work(model).products + 4 * 3 * 5 * 14 * 64 * 2
    assert work.bytes == 2 * pass_work(model).products + 10 * (2 * 2 * 2 * 2 * 64) + 3 * 8 * 64
    assert pass_work(POLICIES["qwen2.5-32b"]).products == pytest.approx(32.8e9 - 0.78e9, rel=2e-3)


def test_a_pass_takes_what_is_published_of_it():
    """TLT's tables 2 and 7, and SpecActor's bound; the second has all-reduces, and no other key differs."""
    for overrides, rate in (("model=qwen2.5-7b tensor=1", 164.65), ("model=qwen2.5-7b tensor=2", 242.11)):
        costs = Scenario().replaced(overrides.split()).pass_costs()
        assert 1 / costs.fixed(1) == pytest.approx(rate, rel=0.01)
    assert Scenario().replaced(["model=qwen2.5-32b", "tensor=4"]).pass_costs().fixed(1) < 0.013


def steps(*lengths):
    """Steps of responses to prompts of their own."""
    return iter([[Response(i, 0, length) for i, length in enumerate(step)] for step in lengths])


def times(cluster):
    return [(step.begin, step.end, step.trained) for step in cluster.steps]


def machines(workers, slots=1, train=2.0, **more):
    return Machines(workers, slots, SECOND, train_seconds=lambda tokens: train, **more)


class InTurn(SharedQueue):
    """Each of two workers has a response of every step, and in the next step the other one's."""

    def begin(self, requests):
        super().begin(requests)
        first, second = sorted(requests)[:: 1 if requests[min(requests)].step % 2 else -1]
        self.own = {"worker-0": first, "worker-1": second}

    def waiting(self, worker):
        return worker in self.own

    def take(self, worker, share):
        return [self.own.pop(worker.name)] if worker.name in self.own else []


def test_the_cache_of_a_moved_response_is_copied_while_its_beginning_is_computed():
    """SpecActor, section 4.3: where copying takes a third of computing, a quarter is computed meanwhile."""
    costs = RooflineCosts(0.3, 0.0, 0.0, 1.0)  # seconds of a computed token, and of a pass besides
    for moved, begun in ((None, 0.3 * 30 + 1.0), (0.1, 0.1 * 30)):
        worker = SimulatedWorker("w", 2, costs, moved=moved)
        worker.add([job(0, 25, prompt=10, begin=20)], 0.0)
        assert worker.next_end() == pytest.approx(begun + 5 * 1.3)
    worker = SimulatedWorker("w", 2, costs, moved=0.1)
    worker.add([job(0, 5, prompt=10)], 0.0)  # a prompt is prefilled, wherever it is
    assert worker.next_end() == pytest.approx(0.3 * 10 + 1.0 + 5 * 1.3)
    scenario = Scenario(model="qwen2.5-32b", tensor=4, cache_gb_s=50.0)
    computed, copied = 2 * 32.0e9 / (4 * 0.5 * 9.89e14), 2 * 2 * 64 * 8 * 128 / 50e9
    expected = 1 / (1 / computed + 1 / copied)
    assert scenario.moved_seconds(scenario.pass_costs()) == pytest.approx(expected, rel=0.03)
    assert scenario.machines().moved_seconds == scenario.moved_seconds(scenario.pass_costs())
    assert Scenario().machines().moved_seconds is None


def test_orders_of_steps_by_hand():
    """Two workers, of which one has 10 tokens and the other 4, in turn, and an update of 2 seconds."""
    lengths = [[10, 4]] * 3
    on_policy = Cluster(machines(2), "on-policy", InTurn())
    on_policy.run(steps(*lengths), 3)
    assert times(on_policy) == [(0, 10, 12), (12, 22, 24), (24, 34, 36)]
    one_off = Cluster(machines(2), "one-off", InTurn())
    one_off.run(steps(*lengths), 3)
    # The second rollout needs no update, the third one the first.
    assert times(one_off) == [(0, 10, 12), (10, 20, 22), (20, 30, 32)]
    pipe = Cluster(machines(2), "pipe", InTurn(), spans=True)
    pipe.run(steps(*lengths), 3)
    # The second worker begins step 2 at 4, and ends it at 14, as the first one does; step 3 begins with the
    # weights of step 1.
    assert times(pipe) == [(0, 10, 12), (0, 14, 16), (12, 24, 26)]
    assert sorted((span.step, span.worker, span.begin, span.end) for span in pipe.spans) == [
        (1, 0, 0, 10), (1, 1, 0, 4), (2, 0, 10, 14), (2, 1, 4, 14), (3, 0, 14, 24), (3, 1, 14, 18),
    ]  # fmt: skip


def test_workers_that_decode_share_the_cores():
    """Both at half the speed as long as both decode, then one at the whole speed."""
    cluster = Cluster(machines(2, cores=1), "on-policy", InTurn())
    cluster.run(steps([10, 4], [3, 3]), 2)
    assert times(cluster) == [(0, 14, 16), (16, 22, 24)]
    assert cluster.busy_seconds() == [14 + 6, 8 + 6]
    alone = Cluster(machines(2, cores=4, cores_of_worker=2), "on-policy", InTurn())
    alone.run(steps([10, 4]), 1)
    assert times(alone) == [(0, 10, 12)]  # as many cores as they can use


def test_a_failed_workers_requests_are_decoded_by_the_other_one():
    cluster = Cluster(machines(2, slots=4, start_seconds=1e6, detect_seconds=1.0), "on-policy")
    cluster._at(3.0, cluster._fail, "worker-0")
    (step,) = cluster.run(steps([10, 10]), 1)
    assert cluster.failures == 1
    # Nothing was reported before the failure at 3, which is noticed at 4: all 10 tokens are decoded again.
    assert step.end == pytest.approx(14.0)
    assert step.tokens == 20


def check_every_token(scenario):
    """The ledger raises where a token is lost, and the clock where nothing happens any more."""
    steps = itertools.islice(Workload(scenario).steps(), scenario.steps)
    expected = [sum(each.tokens for each in step) for step in steps]
    cluster = scenario.run()
    assert [step.tokens for step in cluster.steps] == expected
    for earlier, later in itertools.pairwise(cluster.steps):
        assert earlier.trained <= later.trained
        assert later.begin >= earlier.begin


SMALL = Scenario(
    workers=3, slots=3, prompts_per_step=6, samples=3, prompts=12, mean=50, longest=200, groups=2, train=1.0,
    look=0.2, drafters="a:0.6:0.2:1,b:0.3:0.2:0", steps=5, warm_up=1, restart=2.0, spot_update=0.05,
    spot_updates=10, spot_tokens=500,
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["on-policy", "one-off", "pipe"]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 60.0]),
    st.integers(0, 1000),
)
def test_every_order_decodes_every_token_once(order, balance, failures, seed):
    more = {"balance": balance, "failures_per_hour": failures, "seed": seed}
    scenario = dataclasses.replace(SMALL, order=order, **more)
    check_every_token(scenario)
    assert times(scenario.run()) == times(scenario.run())


def test_lengths_have_the_mean_and_rank_as_stated():
    scenario = Scenario(mean=1000, longest=4000, sigma=0.8, within=0.2, drift=0.0, samples=8)
    first, second = itertools.islice(epochs(scenario, 2000), 2)
    assert first.mean() == pytest.approx(1000, rel=0.05)
    assert first.max() <= 4000
    medians = np.median(first, 1), np.median(second, 1)
    assert np.corrcoef(*medians)[0, 1] > 0.9
    outliers = next(epochs(Scenario(mean=1000, longest=10**6, samples=8, outliers=0.1, jump=3.0), 2000))
    assert outliers.max() > 10 * first.max()


def test_pass_times_come_from_a_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"decoding": [{"rows": 8, "seconds": 0.2}, {"rows": 2, "seconds": 0.1}]}))
    costs = planned_costs(str(path))
    assert [costs.fixed(n) for n in (1, 2, 3, 8, 16)] == [0.1, 0.1, 0.2, 0.2, 0.4]
    assert TableCosts([2, 8], [0.1, 0.2]).fixed(5) == pytest.approx(0.15)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no plan of"):
        planned_costs(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        planned_costs(str(tmp_path / "none"))


def test_lengths_come_from_a_run(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"lengths": {"bin": 10, "counts": [0, 3, 1]}}) + "\n")
    (lengths,) = recorded_lengths(str(path))
    assert sorted(math.ceil(length / 10) for length in lengths) == [2, 2, 2, 3]
    outcome = Scenario(rollouts=str(path), workers=1, samples=2, prompts_per_step=2, steps=2, warm_up=1).run()
    assert outcome.steps[0].tokens == lengths.sum()
    path.write_text("[]\n")
    with pytest.raises(ConfigError, match=r"is no rollouts.jsonl of a run"):
        recorded_lengths(str(path))


def test_figures_of_an_outcome():
    cluster = Cluster(machines(2), "on-policy", InTurn(), spans=True)
    cluster.run(steps([10, 4], [10, 4]), 2)
    outcome = outcome_of(cluster, 1, 2)
    assert (outcome.step_seconds, outcome.rollout_seconds) == (12, 10)
    assert outcome.tokens_per_second == 14 / 12
    assert outcome.busy == pytest.approx(28 / 48)
    assert outcome.first_idle == pytest.approx(0.6)


BAD = """
worker=3 -> worker=3: is not key=value; did you mean 'workers'?
router=ranked -> router: a worker with long responses would be waited for
migration=true -> migration: outliers are those of ranking groups
race=2 -> race: copies need another drafter
model=qwen -> model: unknown model 'qwen'
drafters=srt -> drafters: srt should be name:acceptance
steps=3 -> warm_up: 8 leaves nothing of 3 steps
"""


@pytest.mark.parametrize(("override", "said"), table(BAD))
def test_bad_input_is_one_line(override, said, capsys):
    assert main([override]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_the_command_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    small = ["workers=2", "prompts_per_step=4", "samples=2", "steps=3", "warm_up=1"]
    files = ["--json", str(tmp_path / "out.json"), "--timeline", str(tmp_path / "out.png")]
    assert main([*small, "--compare", "order=pipe", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["step", "s"]
    assert "order=pipe" in lines[2]
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["command"] and content["machine"]["cpu"]
    rows = content["rows"]
    assert [row["scenario"]["order"] for row in rows] == ["on-policy", "pipe"]
    assert len(rows[0]["steps"]) == 3
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
