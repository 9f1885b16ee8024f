"""The table of keys that contradict each other: its keys exist, and a broken rule is refused in one line."""

import inspect

import pytest

from rljax.config import check_over_processes, check_with_workers, load_config
from rljax.config.contradictions import CONTRADICTIONS, OVER_PROCESSES, WITH_WORKERS
from rljax.config.keys import KEYS, SUCCESSORS
from rljax.config.section import Rule, both, broken_rule
from rljax.errors import ConfigError

RULES = (*CONTRADICTIONS, *WITH_WORKERS, *OVER_PROCESSES)
TOOLS = "tools={names: [calculator]}"
AHEAD = ["speculation.drafter=srt", "speculation.run_ahead_below=2"]
MIXTURE = "task.mixture=[{name: chain_arithmetic, schedule: [[0, 1.0], [9, 2.0]]}]"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(rule.keys))
def test_the_keys_of_a_rule_exist(rule):
    for name in rule.keys:
        parent, _, leaf = name.rpartition(".")
        said_of_section = parent in KEYS and isinstance(getattr(KEYS[parent].section, leaf, None), property)
        assert name in KEYS or said_of_section, name
    given = [None] * len(rule.keys)
    inspect.signature(rule.broken).bind(*given) if rule.broken is not bool else None


def test_the_first_rule_that_is_broken_is_the_error(config_file):
    config = load_config(config_file, ["seed=7"])
    second = Rule(
        ("seed", "policy.lora.rank"), lambda seed, rank: rank is None and seed + 1, "{0} {1} {found}"
    )
    assert broken_rule(config, [Rule(("seed", "tools"), both, "first"), second]) == "7 None 8"
    assert broken_rule(config, [Rule(("seed", "rollout"), both, "first"), second]) == "first"
    assert broken_rule(config, []) is None


def test_an_old_key_is_refused_with_its_successor(config_file):
    for old, new in SUCCESSORS.items():
        assert old not in KEYS and new in KEYS
        with pytest.raises(ConfigError) as error:
            load_config(config_file, [f"{old}=1"])
        assert str(error.value) == f"{old}: is now {new}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.lora={path: x}"], "policy.lora.path: .* was trained on; set policy.path to"),
        (
            [
                "policy={path: x, lora: {path: y}, growth: {hidden_size: 8, mlp_size: 8, num_layers: 1}}",
            ],
            "policy.lora.path: .*; policy.growth changes it",
        ),
        (["policy={path: x, lora: {path: y}}", "warm_start={}"], "policy.lora.path: .*but warm_start trains"),
        (["task.name=mixture"], "task.mixture: lists the tasks"),
        (["task.name=mixture", "task.problems=3", MIXTURE], "task.problems: must be 0 with a schedule"),
        (["task={name: mixture, args: {a: 1}}", MIXTURE], "task.args: a mixture has none"),
        (
            ["tools={names: [calculator, python], opening: '<'}"],
            r"tools.opening: '<' is the same for all of \['calculator', 'python'\]; put \{name\} where",
        ),
        ([TOOLS, "rollout.frequency_penalty=0.5"], "tools: need rollout.repetition_penalty 1.0"),
        (["speculation.run_ahead_below=2"], "speculation.run_ahead_below: needs a drafter to fall back to"),
        (
            [
                "speculation={drafter: srt, others: {eagle: {}}, mix: true}",
                "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
            ],
            r"speculation.mix: adds to .* as \{drafter: srt\+eagle, \.\.\.\}$",
        ),
        ([*AHEAD, "engine.verification=rejection"], "speculation.run_ahead_below: .*coupled, got rejection"),
        (
            ["algorithm.advantage_baseline=none", "algorithm.advantage_normalization=std"],
            "algorithm.advantage_normalization: std is that of a group, but advantage_baseline none",
        ),
        (
            [
                "algorithm.advantage_baseline=critic",
                "algorithm.advantage_normalization=batch",
                "algorithm.ratio=sequence",
            ],
            "algorithm.ratio: sequence gives .* but advantage_baseline critic",
        ),
        (["algorithm.discount=0.5"], "algorithm.discount: 0.5 is read with .*, not with group"),
        (["algorithm.dynamic_sampling_part=exact"], "algorithm.dynamic_sampling_part: is not used without"),
        (
            ["algorithm.teacher=x", "algorithm.kl_coefficient=0"],
            "algorithm.teacher: is not used with algorithm.kl_coefficient 0",
        ),
        (["algorithm.name=distillation"], "algorithm.teacher: distillation needs one"),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator: k1 with kl_in: loss .*; use k2 or k3$",
        ),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"],
            "algorithm.kl_estimator: k3 with kl_in: reward .*; use k1$",
        ),
        (["evaluation.pass_at=[1, 4]"], "evaluation.pass_at: 4 is more than evaluation.samples 1"),
        (["checkpoint.keep_best=1"], "checkpoint.keep_best: needs evaluation.every"),
        (
            ["rollout.max_staleness=2", "cluster.workers=2", *AHEAD],
            "rollout.max_staleness: is not possible with speculation.run_ahead_below",
        ),
        (
            ["rollout.max_staleness=2", "cluster.workers=2", TOOLS],
            "rollout.max_staleness: is not possible with tools",
        ),
        (
            ["distributed.process=0"],
            "distributed.process: needs distributed.coordinator and distributed.proc",
        ),
        (
            ["distributed={coordinator: 'host:1', processes: 2}"],
            "distributed.coordinator: needs distributed.process as well; set all three",
        ),
        (
            ["distributed={coordinator: 'host:1', processes: 2, process: 2}"],
            "distributed.process: 2 must be less than distributed.processes 2",
        ),
        *(
            (["agents={}", *overrides], f"{key}: is not supported with agents: ")
            for key, *overrides in (
                ("tools", TOOLS),
                ("cluster.workers", "cluster.workers=2"),
                ("distributed", "distributed.enabled=on"),
                ("speculation.run_ahead_below", *AHEAD),
                ("speculation.overlap", "speculation.overlap=true"),
                ("algorithm.overlong_buffer", "algorithm.overlong_buffer=8"),
                ("engine.verification", "engine.verification=rejection"),
            )
        ),
    ],
)
def test_a_broken_rule_is_one_line(config_file, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        load_config(config_file, overrides)
    assert "\n" not in str(error.value)


def test_what_one_process_decides_is_not_for_several(config_file):
    for overrides, message in (
        ([TOOLS], "tools: decides by the clock of one process"),
        (["rollout.staleness=1"], "rollout.staleness: is for one process that trains"),
        (["rollout.max_staleness=2", "cluster.workers=2"], "rollout.max_staleness: is for one process that"),
    ):
        config = load_config(config_file, ["mesh.data=4", *overrides])
        with pytest.raises(ConfigError, match=f"^{message}"):
            check_over_processes(config, 4, 2, {"eagle"})


def test_groups_are_left_to_the_next_step_where_there_is_one(config_file):
    config = load_config(config_file, ["cluster.into_next_step=true", "cluster.workers=2"])
    with pytest.raises(ConfigError, match=r"^cluster.into_next_step: .* set rollout.max_staleness to 2"):
        check_with_workers(config)
