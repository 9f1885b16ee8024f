"""What the papers add, on the simulator's clock: races, training in idle time, and all of it at once."""

import dataclasses
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljax.cluster.router import SharedQueue
from rljax.papers.specactor.racing import Racing
from rljax.papers.tlt.simulated_spot import SpotTimes
from rljax.papers.tlt.spot import SpotRule
from rljax.simulation.cluster import Cluster, Machines, Response
from rljax.simulation.command import main
from rljax.simulation.costs import TableCosts
from rljax.simulation.drafting import LEVELS, Drafting, SimulatedDrafter
from rljax.simulation.scenario import Scenario
from rljax.simulation.sizes import chosen_sizes
from tests.simulation.test_simulation import SECOND, SMALL, check_every_token


def test_a_racer_begins_the_next_rollout_with_the_first_drafter():
    good, bad = int(0.9 * LEVELS), int(0.1 * LEVELS)
    drafting = Drafting(SECOND, {"good": SimulatedDrafter(0.9), "bad": SimulatedDrafter(0.1)}, [4])
    race = Racing(SharedQueue(), ["good", "bad"], 1)
    cluster = Cluster(Machines(2, 1, SECOND, drafting, look_seconds=1.0), router=race, spans=True)
    rollout = [Response(0, 0, 100, (good, bad)), Response(1, 0, 10, (good, bad))]
    first, second = cluster.run(iter([rollout, rollout[::-1]]), 2)  # the racer has the long one then
    assert sum(span.kind == "copy" for span in cluster.spans) == 2
    assert second.end - second.begin == pytest.approx(first.end - first.begin)


def test_a_race_does_not_stop_the_response_that_it_copies():
    """A copy is alone on its worker, and soon ahead, with the worse drafter. The first worker goes on beside
    its seven others, takes the response up from the copy once they have ended, and ends it first.
    """
    good, bad = int(0.9 * LEVELS), int(0.5 * LEVELS)
    by_rows = TableCosts([1, 100], [1.0, 100.0], 0.01)  # a pass takes a second a row, a prefill little
    drafting = Drafting(by_rows, {"good": SimulatedDrafter(0.9), "bad": SimulatedDrafter(0.5)}, [4])
    rollout = [
        Response(number // 8, 0, tokens, (good, bad))
        for number, tokens in enumerate([2000] + [200] * 7 + [10] * 8)
    ]

    def seconds(router):
        (step,) = Cluster(Machines(2, 8, by_rows, drafting), router=router).run(iter([rollout]), 1)
        return step.end

    alone, racing = SharedQueue(), Racing(SharedQueue(), ["good", "bad"], 1, initial="good")
    assert seconds(racing) < 0.9 * seconds(alone)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["shared", "static", "ranked", "two-tiers"]),
    st.sampled_from(["on-policy", "one-off", "pipe"]),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 60.0]),
    st.integers(0, 1000),
    st.sampled_from([0, 1, 2]),
)
@example("ranked", "pipe", False, 0, 0, 60.0, 342, 0)  # a worker is lost between two rollouts
def test_every_combination_decodes_every_token_once(
    router, order, migration, balance, race, failures, seed, spot
):
    if router in ("ranked", "two-tiers"):
        order = "pipe"
    else:
        migration = False
    scenario = dataclasses.replace(
        SMALL, order=order, router=router, migration=migration, balance=balance, race=race, seed=seed,
        failures_per_hour=failures, spot=spot,
    )  # fmt: skip
    check_every_token(scenario)


def spot_steps(update_seconds, **rule):
    """Two workers with a response each, of 5 and of 20 tokens, that train a head in between."""
    rule = SpotRule(**{"idle": 1, "save_every": 2, "updates": 9, "tokens": 99, "batch_tokens": 9} | rule)
    spot = SpotTimes(dataclasses.replace(rule, retry=math.inf), update_seconds, lambda tokens: 1.0)
    cluster = Cluster(Machines(2, 1, SECOND, spot=spot))
    steps = cluster.run(iter([[Response(0, 0, 5), Response(1, 0, 20)]] * 2), 2)
    return [(step.begin, step.end) for step in steps], cluster.coordinator.idle_work.counts


def test_a_worker_trains_from_the_end_of_its_responses_to_that_of_the_rollout():
    steps, counts = spot_steps(2.5)
    assert steps == [(0, 20), (20, 40)]  # as without
    # From 5 on: a second for the features, then five whole updates up to 18.5; in each step.
    assert (counts.sessions, counts.updates, counts.delay) == (2, 10, 0)
    # The second one reads the response that was too late in the first one, too: in a pass of its own.
    assert (counts.samples, counts.seconds) == (3, 3 * 1.0 + 10 * 2.5)
    _, counts = spot_steps(2.5, updates=3)
    assert counts.updates == 6
    steps, counts = spot_steps(100.0)
    assert steps == [(0, 20), (20, 40)]
    assert counts.updates == 0


def test_a_worker_that_is_needed_ends_its_update_first():
    spot = SpotTimes(SpotRule(1, 2, 9, 99, 9, retry=math.inf), 10.0, lambda tokens: 1.0)
    cluster = Cluster(Machines(2, 1, SECOND, detect_seconds=0.0, spot=spot))
    cluster._at(8.0, cluster._fail, "worker-1")
    (step,) = cluster.run(iter([[Response(0, 0, 5), Response(1, 0, 20)]]), 1)
    # It updates from 6 to 16, and decodes what worker-1 had from then on.
    assert (step.end, cluster.coordinator.idle_work.counts.delay) == (36, 8)


def test_algorithm_1_chooses_the_sizes_of_a_scenario(capsys, tmp_path):
    """A verifier of more devices has more requests, and reads its weights faster than it computes them."""
    keys = ["model=qwen2.5-32b", "tensor=4", "workers=16", "prompts_per_step=8", "samples=16"]
    scenario = Scenario().replaced([*keys, "drafters=small:0.9:0.1:1:0"])
    found = chosen_sizes(scenario, (2, 4))
    assert sorted(found) == ["coupled", "decoupled", "plain"]
    for choice in found.values():
        own = choice.drafter_devices + choice.verifier_devices
        assert choice.batch == math.ceil(own * 128 / 64)
        costs = dataclasses.replace(scenario, tensor=choice.verifier_devices).pass_costs()
        seconds = costs.fixed(choice.batch * (choice.window + 1))
        seconds += choice.batch * costs.cached * (300 + 2000)
        if choice.mode == "plain":
            assert choice.speed == pytest.approx(1 / seconds, rel=0.1)  # a pass is affine but for its corner
    assert found["decoupled"].drafter_devices == 1 and found["plain"].window == 0
    alone = chosen_sizes(Scenario().replaced([*keys, "workers=1", "drafters=small:0.9:0.1:1:0"]), (4,))
    assert "decoupled" not in alone  # nothing is left to draft on
    file = tmp_path / "sizes.json"
    assert main([*keys, "drafters=small:0.9:0.1:1:0", "--sizes", "2,4", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["choices"]["plain"]["mode"] == "plain"
    assert capsys.readouterr().out.count("tokens/s a request") == 3
    for sizes, more, said in (
        ("2", [], "--sizes: nothing drafts"),
        ("9", ["drafters=a:0.5:0:0", "workers=2"], "--sizes: [9] should have numbers from 1 to 8 devices"),
        ("two", ["drafters=a:0.5:0:0"], "--sizes: two should be numbers"),
    ):
        assert main([*keys, *more, "--sizes", sizes]) == 2
        assert said in capsys.readouterr().err
