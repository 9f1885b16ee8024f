"""Keys of the papers' policies: what is refused, in one line, and what changes no number of a run."""

import re
import types

import pytest

from drafters.registry import make_drafters
from rljax.config import check_over_processes, check_with_workers, load_config, to_yaml
from rljax.config.changes import config_changes
from rljax.config.speculation import SpeculationConfig
from rljax.errors import ConfigError
from rljax.evaluation.settings import evaluation_config
from rljax.papers.tlt.spot_driver import make_driver
from tests.configs import table

KEYS = """
SRT & .strategies=[STRATEGY] -> .strategies: only speculation.choice: bandit or fixed reads them
SRT & .mix=true -> .mix: needs speculation.others, and speculation.choice: expected or bandit
SRT & .batch_thresholds=[1] -> .batch_thresholds: needs speculation.choice: bandit, and speculation.strategies
BANDIT & .batch_thresholds=[2, 2] -> .batch_thresholds: should ascend, got
BANDIT & .batch_thresholds=[1, 17]
    -> .batch_thresholds: from 17 responses on nothing is drafted, since speculation.max_batch is 16
BANDIT & .batch_thresholds=[0] -> .batch_thresholds
SRT & .others={quantized: {}} & .choice=roofline
    -> .choice: roofline switches one drafter on and off; set speculation.drafter, and no
.choice=cutoff -> .choice: cutoff has a table of one drafter
SRT & .others={quantized: {}} & .choice=cutoff
    -> .choice: cutoff has a table of one drafter; set speculation.drafter, and no
.choice=roofline -> .choice: roofline switches one drafter on and off
.toggle.lengths=[5, 5] -> .toggle.lengths: [5, 5] should be ascending
.toggle.lengths=[0, 1] -> .toggle.lengths
.toggle.lengths=[] -> .toggle.lengths:
.toggle.first=6 -> .toggle.first: 6 is none of lengths [5, 7, 9, 11]
.toggle.alpha_down=0.95 -> .toggle.alpha_down: 0.95 should be less than alpha_up 0.94
.toggle.alpha_up=1.2 -> .toggle.alpha_up
.toggle.patience=0 -> .toggle.patience: should be greater than
.toggle.margin=-0.1 -> .toggle.margin: should be greater than
.drafter=quantized & .choice=roofline & .max_drafts=7 & .toggle.first=9
    -> .toggle.first: 9 is more than speculation.max_drafts 7
cluster.pipe=ranks -> cluster.pipe:
cluster.migration=true -> cluster.migration: moves what outgrows its group; set cluster.pipe
cluster.pipe_groups=2 -> cluster.pipe_groups: are those of cluster.pipe, which is off
cluster.pipe_max_workers=2 -> cluster.pipe_max_workers: sizes the groups of
cluster={workers: 3, pipe: two_tiers, pipe_groups: 2, pipe_min_workers: 2}
    -> cluster.pipe_min_workers: 2 for each of 2 ranking groups are more than cluster.workers: 3
cluster={workers: 6, pipe: two_tiers, pipe_groups: 2, pipe_min_workers: 2} & cluster.pipe_max_workers=1
    -> cluster.pipe_max_workers: 1 is less than cluster.pipe_min_workers: 2
SMALL & .decoupled.window=1 -> .decoupled.window: 1 leaves nothing to
SMALL & .max_drafts=3 -> .decoupled.window: 4 is more than speculation.
SMALL & SRT -> .decoupled.window: needs speculation.drafter: small_model or eagle; others draft
SMALL & .others={srt: {}} -> .decoupled.window: with speculation.others needs speculation.choice: ladder
SMALL & .choice=bandit -> .decoupled.window: is chosen by SpecActor's Algorithm 1; leave out
SMALL & .overlap=true -> .decoupled.window: is not possible with speculation.overlap
SMALL & .decoupled.devices=[] -> .decoupled.devices:
SMALL & .decoupled.modes=[always] -> .decoupled.modes.0:
SMALL & engine.verification=rejection -> .decoupled.window: needs engine.verification: coupled, got rejection
.run_ahead_below=2 -> .run_ahead_below: needs a drafter to fall back to
AHEAD & engine.verification=rejection -> .run_ahead_below: needs engine.verification: coupled, got rejection
rollout.max_staleness=2 & cluster.workers=2 & AHEAD
    -> rollout.max_staleness: is not possible with speculation.run_ahead_below
agents={} & AHEAD -> .run_ahead_below: is not supported with agents:
SMALL & rollout.presence_penalty=0.5 -> .decoupled.window: needs rollout.repetition_penalty 1.0
SMALL & cluster.gpus_per_worker=1 & WORKERS
    -> cluster.gpus_per_worker=1: is not supported with cluster.workers: cluster.mesh has 1 devices and spec
cluster.into_next_step=true & WORKERS
    -> cluster.into_next_step: prompts are handed out one step ahead and wait for one more; set rollout.max
cluster.pipe=ranked & WORKERS -> cluster.pipe: every step would wait for the worker with the longest
cluster={pipe: ranked, migration: true, into_next_step: true} & rollout.max_staleness=2 & WORKERS
    -> cluster.migration: a response that goes on under newer weights stays with its worker
cluster.race=2 & SRT & WORKERS -> cluster.race: copies need another drafter
cluster.race=2 & SRT & OTHER & tools={names: [calculator]} & WORKERS -> cluster.race: a copy would
AHEAD & algorithm.dynamic_sampling=true & WORKERS -> .run_ahead_below: is not supported with cluster.workers
AHEAD & distributed.enabled=on & WORKERS -> .run_ahead_below: is not supported with cluster.workers and dist
AHEAD & cluster.spot.idle=1 & WORKERS -> cluster.spot.idle: an idle worker trains, or samples ahead
WORKERS & cluster.spot.idle=2 -> cluster.spot.idle: 2 of 2 workers are never idle within a rollout
WORKERS & cluster.spot.idle=1 & rollout.max_staleness=2
    -> cluster.spot.idle: with rollout.max_staleness no rollout ends
"""
"""Keys and what is said of them; one that begins with a point is of the section `speculation`."""
WORDS = {
    "AHEAD": ".drafter=srt & .run_ahead_below=2",
    "BANDIT": ".drafter=srt & .choice=bandit & .strategies=[STRATEGY]",
    "STRATEGY": "{drafter: srt, depth: 3, top_k: 1, nodes: 3}",
    "SMALL": ".drafter=small_model & .decoupled.window=4",
    "SRT": ".drafter=srt",
    "OTHER": ".others={prompt_lookup: {}}",
    "WORKERS": "cluster.workers=2",
}


@pytest.mark.parametrize(("overrides", "says"), table(KEYS))
def test_impossible_keys_are_one_line(config_file, overrides, says):
    for word, meaning in WORDS.items():
        overrides = overrides.replace(word, meaning)
    with pytest.raises(ConfigError) as error:
        overrides = re.sub(r"(^|& )\.", r"\1speculation.", overrides).split(" & ")
        check_with_workers(load_config(config_file, overrides))
    said = str(error.value)
    assert said.startswith(f"speculation{says}" if says.startswith(".") else says) and "\n" not in said


@pytest.fixture
def with_keys(config_file):
    return lambda *overrides: load_config(config_file, overrides)


def test_where_constants_are_kept_changes_no_number(config_file):
    keys = ["engine.verification=rejection"]
    old, new = (
        load_config(config_file, [*keys, *more]) for more in ([], ["speculation.calibration_dir=there"])
    )
    (change,) = config_changes(old, new)
    assert (change.name, change.harmless) == ("speculation.calibration_dir", True)


def test_processes_draft_by_the_clock_of_the_first_but_windows(with_keys):
    head = ("mesh.data=4", "speculation.drafter=eagle")
    more = ("speculation.others={srt: {}, quantized: {}}", "speculation.overlap=true")
    for choice in ("expected", "bandit", "ladder"):
        choices = (f"speculation.choice={choice}", "speculation.run_ahead_below=2")
        check_over_processes(with_keys(*head, *more, *choices), 4, 2, {"eagle"})
    with pytest.raises(ConfigError, match=r"speculation.decoupled.window: decides by the clock of one"):
        check_over_processes(with_keys(*head, "speculation.decoupled.window=3"), 4, 2, {"eagle"})


def test_what_routers_need_is_enough(with_keys):
    drafters = ("speculation.drafter=srt", "speculation.others={prompt_lookup: {}}", "cluster.race=2")
    for keys in (
        ("cluster={workers: 2, pipe: two_tiers}", "rollout.staleness=1", *drafters),
        ("cluster={workers: 2, pipe: two_tiers, into_next_step: true}", "rollout.max_staleness=2"),
    ):
        check_with_workers(with_keys(*keys))


def test_training_in_idle_time_needs_a_drafter_that_is_trained(with_keys):
    config = with_keys("cluster.workers=2", "cluster.spot.idle=1")
    for training in ({}, {"srt": types.SimpleNamespace(spot=None)}):
        with pytest.raises(ConfigError, match=r"^cluster.spot.idle: no drafter is trained; set speculation"):
            make_driver(config.cluster, types.SimpleNamespace(training=training), None)
    assert make_driver(with_keys().cluster, None, None) is None


@pytest.mark.parametrize("others", [{}, {"eagle": {}}])
def test_run_ahead_needs_a_drafter_on_the_host(others):
    message = r"speculation\.run_ahead_below: must be 0 with speculation\.drafter: quantized, unless"
    with pytest.raises(ConfigError, match=message):
        make_drafters(SpeculationConfig(drafter="quantized", others=others, run_ahead_below=2))
    assert make_drafters(SpeculationConfig(drafter="quantized", others={"srt": {}}, run_ahead_below=2))


def test_an_evaluation_samples_nothing_ahead(config_file, tmp_path):
    config = load_config(config_file, ["speculation={drafter: srt, run_ahead_below: 2}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    speculation = evaluation_config(tmp_path, None, []).speculation
    assert (speculation.drafter, speculation.run_ahead_below) == ("srt", 0)
    with pytest.raises(
        ConfigError, match=r"^speculation.run_ahead_below: .*; there is no next step"
    ) as error:
        evaluation_config(tmp_path, None, ["speculation.run_ahead_below=1"])
    assert "\n" not in str(error.value)
