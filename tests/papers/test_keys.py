"""Keys of the papers' policies: what is refused, in one line, and what changes no number of a run."""

import types

import pytest

from rljax.config import check_over_processes, check_with_workers, load_config
from rljax.config.changes import config_changes
from rljax.errors import ConfigError
from rljax.papers.tlt.spot_driver import make_driver

OTHER = "speculation.others={prompt_lookup: {}}"
TOOLS = "tools={names: [calculator]}"
DECOUPLED = ["speculation.drafter=small_model", "speculation.decoupled.window=4"]
BANDIT = [
    "speculation.drafter=srt",
    "speculation.choice=bandit",
    "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            [
                "speculation.drafter=srt",
                "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
            ],
            "speculation.strategies: only speculation.choice: bandit or fixed reads them",
        ),
        (
            ["speculation.drafter=srt", "speculation.mix=true"],
            "speculation.mix: needs speculation.others, and speculation.choice: expected or bandit",
        ),
        (
            ["speculation.drafter=srt", "speculation.batch_thresholds=[1]"],
            "speculation.batch_thresholds: needs speculation.choice: bandit, and speculation.strategies",
        ),
        (
            [*BANDIT, "speculation.batch_thresholds=[2, 2]"],
            "speculation.batch_thresholds: should ascend, got",
        ),
        (
            [*BANDIT, "speculation.batch_thresholds=[1, 17]"],
            "speculation.batch_thresholds: from 17 responses on nothing is drafted, since"
            " speculation.max_batch is 16",
        ),
        ([*BANDIT, "speculation.batch_thresholds=[0]"], "speculation.batch_thresholds"),
        (
            ["speculation.drafter=srt", "speculation.others={quantized: {}}", "speculation.choice=roofline"],
            "speculation.choice: roofline switches one drafter on and off; set speculation.drafter, and no",
        ),
        (["speculation.choice=cutoff"], "speculation.choice: cutoff has a table of one drafter"),
        (
            ["speculation.drafter=srt", "speculation.others={quantized: {}}", "speculation.choice=cutoff"],
            "speculation.choice: cutoff has a table of one drafter; set speculation.drafter, and no",
        ),
        (["speculation.choice=roofline"], "speculation.choice: roofline switches one drafter on and off"),
        (
            ["speculation.toggle.lengths=[5, 5]"],
            "speculation.toggle.lengths: [5, 5] should be ascending",
        ),
        (["speculation.toggle.lengths=[]"], "speculation.toggle.lengths: "),
        (
            ["speculation.toggle.first=6"],
            "speculation.toggle.first: 6 is none of lengths [5, 7, 9, 11]",
        ),
        (
            ["speculation.toggle.alpha_down=0.95"],
            "speculation.toggle.alpha_down: 0.95 should be less than alpha_up 0.94",
        ),
        (["speculation.toggle.patience=0"], "speculation.toggle.patience: should be greater than"),
        (["speculation.toggle.margin=-0.1"], "speculation.toggle.margin: should be greater than"),
        (
            [
                "speculation.drafter=quantized",
                "speculation.choice=roofline",
                "speculation.max_drafts=7",
                "speculation.toggle.first=9",
            ],
            "speculation.toggle.first: 9 is more than speculation.max_drafts 7",
        ),
        (["cluster.pipe=ranks"], "cluster.pipe: "),
        (["cluster.migration=true"], "cluster.migration: moves what outgrows its group; set cluster.pipe"),
        (["cluster.pipe_groups=2"], "cluster.pipe_groups: are those of cluster.pipe, which is off"),
        (["cluster.pipe_max_workers=2"], "cluster.pipe_max_workers: sizes the groups of"),
        (
            ["cluster={workers: 3, pipe: two_tiers, pipe_groups: 2, pipe_min_workers: 2}"],
            "cluster.pipe_min_workers: 2 for each of 2 ranking groups are more than cluster.workers: 3",
        ),
        (
            [
                "cluster={workers: 6, pipe: two_tiers, pipe_groups: 2, pipe_min_workers: 2}",
                "cluster.pipe_max_workers=1",
            ],
            "cluster.pipe_max_workers: 1 is less than cluster.pipe_min_workers: 2",
        ),
        ([*DECOUPLED, "speculation.decoupled.window=1"], "speculation.decoupled.window: 1 leaves nothing to"),
        (
            [*DECOUPLED, "speculation.max_drafts=3"],
            "speculation.decoupled.window: 4 is more than speculation.",
        ),
        (
            [*DECOUPLED, "speculation.drafter=srt"],
            "speculation.decoupled.window: needs speculation.drafter: small_model or eagle; others draft",
        ),
        (
            [*DECOUPLED, "speculation.others={srt: {}}"],
            "speculation.decoupled.window: with speculation.others needs speculation.choice: ladder",
        ),
        (
            [*DECOUPLED, "speculation.choice=bandit"],
            "speculation.decoupled.window: is chosen by SpecActor's Algorithm 1; leave out",
        ),
        (
            [*DECOUPLED, "speculation.overlap=true"],
            "speculation.decoupled.window: is not possible with speculation.overlap",
        ),
        ([*DECOUPLED, "speculation.decoupled.devices=[]"], "speculation.decoupled.devices: "),
        ([*DECOUPLED, "speculation.decoupled.modes=[always]"], "speculation.decoupled.modes.0: "),
        (
            [*DECOUPLED, "engine.verification=rejection"],
            "speculation.decoupled.window: needs engine.verification: coupled, got rejection",
        ),
        (
            [*DECOUPLED, "rollout.presence_penalty=0.5"],
            "speculation.decoupled.window: needs rollout.repetition_penalty 1.0",
        ),
    ],
)
def test_impossible_keys_are_one_line(config_file, overrides, named):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, overrides)
    assert str(error.value).startswith(named) and "\n" not in str(error.value)


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


def test_windows_follow_the_clock_of_one_process(config_file):
    keys = ["mesh.data=4", "speculation.drafter=eagle", "speculation.decoupled.window=3"]
    message = "speculation.decoupled.window: decides by the clock of one process"
    with pytest.raises(ConfigError, match=message):
        check_over_processes(load_config(config_file, keys), 4, 2, {"eagle"})


@pytest.mark.parametrize("choice", ["bandit", "ladder"])
def test_processes_draft_by_the_clock_of_the_first(config_file, choice):
    keys = ["mesh.data=4", "speculation.drafter=eagle", f"speculation.choice={choice}"]
    more = ["speculation.others={srt: {}, quantized: {}}", "speculation.overlap=true"]
    config = load_config(config_file, [*keys, *more, "speculation.run_ahead_below=2"])
    check_over_processes(config, 4, 2, {"eagle"})


def test_drafting_devices_of_workers_are_reserved(config_file):
    keys = ["cluster.gpus_per_worker=1", "speculation.drafter=small_model", "speculation.decoupled.window=4"]
    check_with_workers(load_config(config_file, keys))
    with pytest.raises(ConfigError, match=r"^cluster.gpus_per_worker=1: .*cluster\.workers") as error:
        check_with_workers(load_config(config_file, [*keys, "cluster.workers=2"]))
    assert "\n" not in str(error.value)


def test_routers_that_need_more(with_keys):
    for overrides, message in (
        (["cluster.pipe=ranked"], "cluster.pipe: every step would wait for the worker with the longest"),
        (
            ["cluster={pipe: ranked, migration: true, into_next_step: true}", "rollout.max_staleness=2"],
            "cluster.migration: a response that goes on under newer weights stays with its worker",
        ),
        (["cluster.race=2", "speculation.drafter=srt"], "cluster.race: copies need another drafter"),
        (["cluster.race=2", "speculation.drafter=srt", OTHER, TOOLS], "cluster.race: a copy would"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}") as error:
            check_with_workers(with_keys(*overrides, "cluster.workers=2"))
        assert "\n" not in str(error.value)
    enough = ["cluster.pipe=two_tiers", "rollout.staleness=1", "cluster.race=2", "speculation.drafter=srt"]
    enough += [OTHER, "cluster.workers=2"]
    check_with_workers(with_keys(*enough))
    both = "cluster={workers: 2, pipe: two_tiers, into_next_step: true}"
    check_with_workers(with_keys(both, "rollout.max_staleness=2"))


def test_training_in_idle_time_that_cannot_be(with_keys):
    with pytest.raises(
        ConfigError, match=r"cluster.spot.idle: 2 of 2 workers are never idle within a rollout"
    ):
        with_keys("cluster.workers=2", "cluster.spot.idle=2")
    config = with_keys("cluster.workers=2", "cluster.spot.idle=1", "rollout.max_staleness=2")
    with pytest.raises(ConfigError, match=r"^cluster.spot.idle: with rollout.max_staleness no rollout ends"):
        check_with_workers(config)
    config = with_keys("cluster.workers=2", "cluster.spot.idle=1")
    for training in ({}, {"srt": types.SimpleNamespace(spot=None)}):
        with pytest.raises(ConfigError, match=r"^cluster.spot.idle: no drafter is trained; set speculation"):
            make_driver(config.cluster, types.SimpleNamespace(training=training), None)
    assert make_driver(with_keys().cluster, None, None) is None


def test_groups_are_left_to_the_next_step_where_there_is_one(config_file):
    config = load_config(config_file, ["cluster.into_next_step=true", "cluster.workers=2"])
    with pytest.raises(ConfigError, match=r"^cluster.into_next_step: .* set rollout.max_staleness to 2"):
        check_with_workers(config)
