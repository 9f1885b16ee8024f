"""The table of keys that contradict each other: its keys exist, and a broken rule is refused in one line."""

import inspect

import pytest

from rljax.config import load_config
from rljax.config.contradictions import CONTRADICTIONS, OVER_PROCESSES, WITH_WORKERS
from rljax.config.keys import KEYS, SUCCESSORS
from rljax.errors import ConfigError
from tests.configs import table

RULES = (*CONTRADICTIONS, *WITH_WORKERS, *OVER_PROCESSES)
SHORT = {
    "TOOLS": "tools={names: [calculator]}",
    "CHAIN": "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
    "MIXTURE": "task.mixture=[{name: chain_arithmetic, schedule: [[0, 1.0], [9, 2.0]]}]",
}


def overrides_of(text):
    """A row's overrides, with what SHORT has for a word in capitals."""
    return [each for word in text.split(" & ") for each in SHORT.get(word, word).split(" & ")]


def test_the_keys_of_a_rule_exist():
    for rule in RULES:
        for name in rule.keys:
            parent, _, leaf = name.rpartition(".")
            of_section = parent in KEYS and isinstance(getattr(KEYS[parent].section, leaf, None), property)
            assert name in KEYS or of_section, name
        given = [None] * len(rule.keys)
        inspect.signature(rule.broken).bind(*given) if rule.broken is not bool else None


def test_an_old_key_is_refused_with_its_successor(config_file):
    for old, new in SUCCESSORS.items():
        assert old not in KEYS and new in KEYS
        with pytest.raises(ConfigError) as error:
            load_config(config_file, [f"{old}=1"])
        assert str(error.value) == f"{old}: is now {new}"


BROKEN = r"""
policy.shape=null -> policy: neither policy.path
policy.path=somewhere -> policy: both policy.path and policy.shape
policy.shape.num_kv_heads=3 -> policy.shape.num_heads: 4 is not a multiple of num_kv_heads 3
kernels.packed_attention=triton -> kernels.packed_attention: triton has other bits than
kernels.packed_attention=triton & engine.row_invariant=false -> kernels.packed_attention: triton knows
policy.shape.head_dim=15 -> policy.shape.head_dim: 15 is odd
policy.shape.attention_bias=true -> policy.shape.attention_bias: cannot be true
policy.shape.max_positions=1535 -> policy.shape.max_positions: 1535 is less than rollout.max_prompt
policy.lora={path: x} -> policy.lora.path: .* was trained on; set policy.path to
policy={path: x, lora: {path: y}, growth: {hidden_size: 8, mlp_size: 8, num_layers: 1}}
    -> policy.lora.path: .*; policy.growth changes it
policy={path: x, lora: {path: y}} & warm_start={} -> policy.lora.path: .*but warm_start trains
task.name=mixture -> task.mixture: lists the tasks
task.name=mixture & task.problems=3 & MIXTURE -> task.problems: must be 0 with a schedule
task={name: mixture, args: {a: 1}} & MIXTURE -> task.args: a mixture has none
tools={names: [calculator, python], opening: '<'}
    -> tools.opening: '<' is the same for all of \['calculator', 'python'\]; put \{name\} where
TOOLS & rollout.frequency_penalty=0.5 -> tools: need rollout.repetition_penalty 1.0
rollout.top_k=1 -> rollout.top_k: 1 makes all samples
rollout.samples_per_prompt=1 -> rollout.samples_per_prompt: 1 makes every advantage 0
rollout.samples_per_prompt=1 & algorithm.advantage_normalization=none
    -> rollout.samples_per_prompt: 1 makes every advantage 0
rollout.samples_per_prompt=1 & algorithm.dynamic_sampling=true
    -> algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2
rollout.max_staleness=2 & cluster.workers=2 & TOOLS -> rollout.max_staleness: is not possible with tools
training.pack_length=1535 -> training.pack_length: 1535 is less than rollout.max_prompt_length
training.minibatches_per_step=257 -> training.minibatches_per_step: 257 is more than the 256
algorithm.overlong_buffer=1024 -> algorithm.overlong_buffer: 1024 must be less than
algorithm.advantage_baseline=none & algorithm.advantage_normalization=std
    -> algorithm.advantage_normalization: std is that of a group, but advantage_baseline none
algorithm.advantage_baseline=critic & algorithm.advantage_normalization=batch & algorithm.ratio=sequence
    -> algorithm.ratio: sequence gives .* but advantage_baseline critic
algorithm.discount=0.5 -> algorithm.discount: 0.5 is read with .*, not with group
algorithm.dynamic_sampling_part=exact -> algorithm.dynamic_sampling_part: is not used without
algorithm.teacher=x & algorithm.kl_coefficient=0
    -> algorithm.teacher: is not used with algorithm.kl_coefficient 0
algorithm.name=distillation -> algorithm.teacher: distillation needs one
algorithm.kl_coefficient=0.1 & algorithm.kl_estimator=k1
    -> algorithm.kl_estimator: k1 with kl_in: loss .*; use k2 or k3$
algorithm.kl_coefficient=0.1 & algorithm.kl_in=reward
    -> algorithm.kl_estimator: k3 with kl_in: reward .*; use k1$
engine.batch_buckets=[8, 4, 64] -> engine.batch_buckets: \[8, 4, 64\] must ascend
engine.batch_buckets=[64, 64] -> engine.batch_buckets: \[64, 64\] must ascend
engine.batch_buckets=[] -> engine.batch_buckets: is empty
engine.batch_buckets=[8, 32] -> engine.batch_buckets: the largest, 32, is less than engine.max_slots
engine.cache_buckets=[512] -> engine.cache_buckets: the largest, 512, is less than rollout.max_prompt
engine.weights=fsdp & mesh.data=2 -> engine.weights: fsdp splits the weights over mesh.fsdp, which is 1
speculation.verify_buckets=[16, 8] -> speculation.verify_buckets: \[16, 8\] must ascend, without
speculation.verify_buckets=[8, 8] -> speculation.verify_buckets: \[8, 8\] must ascend, without
speculation.verify_buckets=[] -> speculation.verify_buckets: is empty; list at least one size
speculation.verify_buckets=[3] -> speculation.verify_buckets: the largest, 3, is less than
speculation.drafter=quantized & engine.verification=target_only
    -> speculation.drafter: quantized needs engine.verification: coupled, got target_only
speculation.max_drafts=64 -> speculation.max_drafts: 64 is more than 63
speculation.args.rollouts=3 -> speculation.args.rollouts: there is no drafter that would read it; set
    speculation.drafter, or speculation.args=\{\}
speculation.others={srt: {}} -> speculation.others: needs a first drafter; set speculation.drafter
speculation.drafter=srt & speculation.others={srt: {}}
    -> speculation.others: srt is speculation.drafter already
speculation.drafter=srt & speculation.mix=true
    -> speculation.mix: needs speculation.others, and speculation.choice: expected
speculation={drafter: srt, others: {eagle: {}}, mix: true} & CHAIN
    -> speculation.mix: adds to .* as \{drafter: srt\+eagle, \.\.\.\}$
speculation.drafter=srt & CHAIN -> speculation.strategies: only speculation.choice:
speculation.drafter=srt & speculation.choice=fixed
    -> speculation.choice: fixed needs one strategy in speculation.strategies, got 0
evaluation.pass_at=[1, 4] -> evaluation.pass_at: 4 is more than evaluation.samples 1
checkpoint.keep_best=1 -> checkpoint.keep_best: needs evaluation.every
distributed.process=0 -> distributed.process: needs distributed.coordinator and distributed.proc
distributed={coordinator: 'host:1', processes: 2}
    -> distributed.coordinator: needs distributed.process as well; set all three
distributed={coordinator: 'host:1', processes: 2, process: 2}
    -> distributed.process: 2 must be less than distributed.processes 2
agents={} & TOOLS -> tools: is not supported with agents:
agents={} & cluster.workers=2 -> cluster.workers: is not supported with agents:
agents={} & distributed.enabled=on -> distributed: is not supported with agents:
agents={} & speculation.overlap=true -> speculation.overlap: is not supported with agents:
agents={} & algorithm.overlong_buffer=8 -> algorithm.overlong_buffer: is not supported with agents:
agents={} & engine.verification=rejection -> engine.verification: is not supported with agents:
"""


@pytest.mark.parametrize(("overrides", "message"), table(BROKEN))
def test_a_broken_rule_is_one_line(config_file, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        load_config(config_file, overrides_of(overrides))
    assert "\n" not in str(error.value)


def test_what_is_just_possible_is_accepted(config_file):
    for overrides in (
        "policy.shape.max_positions=1536 & training.pack_length=1536",
        "algorithm.overlong_buffer=1023",
        "training.minibatches_per_step=256",
        "engine.batch_buckets=[64] & engine.cache_buckets=[1536]",
        "policy={path: somewhere} & warm_start={}",
        "rollout.top_p=1.0 & rollout.top_k=2 & rollout.samples_per_prompt=2",
    ):
        load_config(config_file, overrides_of(overrides))
