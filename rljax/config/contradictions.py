"""Keys that contradict each other: a table of rules, of which the first that is broken is the error.

`CONTRADICTIONS` holds for every experiment, `WITH_WORKERS` and `OVER_PROCESSES` where rollouts have workers
or a run several processes (`limits.py`). A value that its key can never have is refused by the key's section.
"""

from rljax.algorithms.registry import NEED_TEACHER
from rljax.config.decoding import MAX_NODES, misfit
from rljax.config.distributed import missing_keys
from rljax.config.section import Rule, both, first_alone
from rljax.config.speculation import POLICIES, readers_of
from rljax.config.tools import mistaken_answer, stop_in_closing
from rljax.config.wing import MECHANISMS

_LENGTHS = ("rollout.max_prompt_length", "rollout.max_response_length")
_PENALTIES = ("rollout.repetition_penalty", "rollout.frequency_penalty", "rollout.presence_penalty")


_POLICY = (
    Rule(
        ("policy.shape.num_heads", "policy.shape.num_kv_heads"),
        lambda heads, kv_heads: heads is not None and heads % kv_heads,
        "policy.shape.num_heads: {0} is not a multiple of num_kv_heads {1}; every key/value head serves the"
        " same number of query heads",
    ),
    Rule(
        ("policy.shape.attention_bias", "policy.shape.qk_norm"),
        both,
        "policy.shape.attention_bias: cannot be true together with qk_norm; Qwen2 has the bias, Qwen3 the"
        " norms, and no supported architecture both",
    ),
    Rule(
        ("policy.path", "policy.shape"),
        lambda path, shape: path is None and shape is None,
        "policy: neither policy.path (a Hugging Face directory) nor policy.shape (a new model) is set; set"
        " one",
    ),
    Rule(
        ("policy.path", "policy.shape"),
        both,
        "policy: both policy.path and policy.shape are set; keep one (policy.shape=null drops the shape)",
    ),
    Rule(
        ("policy.lora.path", "policy.path"),
        first_alone,
        "policy.lora.path: an adapter belongs to the base that it was trained on; set policy.path to its"
        " directory",
    ),
    Rule(
        ("policy.lora.path", "policy.growth"),
        both,
        "policy.lora.path: an adapter belongs to the base that it was trained on; policy.growth changes it",
    ),
    Rule(
        ("policy.lora.path", "warm_start"),
        both,
        "policy.lora.path: an adapter belongs to the base that it was trained on, but warm_start trains that"
        " further; leave warm_start out (null)",
    ),
    Rule(
        ("policy.shape.max_positions", *_LENGTHS),
        lambda positions, *lengths: positions is not None and positions < sum(lengths) and sum(lengths),
        "policy.shape.max_positions: {0} is less than rollout.max_prompt_length + max_response_length ="
        " {found}",
    ),
)
_TASK_AND_TOOLS = (
    Rule(
        ("task.name", "task.mixture"),
        lambda name, mixture: (name == "mixture") != bool(mixture),
        "task.mixture: lists the tasks of task.name: mixture; set both or none",
    ),
    Rule(
        ("task.problems", "task.mixture"),
        lambda problems, mixture: problems and any(item.schedule for item in mixture),
        "task.problems: must be 0 with a schedule in task.mixture; where the same problems come back, its"
        " positions are never reached",
    ),
    Rule(
        ("task.mixture", "task.args"),
        both,
        "task.args: a mixture has none; each task in task.mixture has its own",
    ),
    *(
        Rule(
            ("tools.names", f"tools.{key}"),
            lambda names, marker: names and len(names) > 1 and "{name}" not in marker and list(names),
            f"tools.{key}: {{1!r}} is the same for all of {{found}}; put {{{{name}}}} where the tool's name"
            " belongs",
        )
        for key in ("opening", "closing")
    ),
    *(
        Rule(
            (f"tools.{closing}", f"tools.{opening}"),
            lambda closing, opening: closing is not None and closing == opening,
            f"tools.{closing}: {{0!r}} is tools.{opening}, too; they must differ",
        )
        for opening, closing in (("opening", "closing"), ("answer_opening", "answer_closing"))
    ),
    Rule(
        ("tools", *_PENALTIES),
        lambda tools, *penalties: tools is not None and penalties != (1.0, 0.0, 0.0),
        "tools: need rollout.repetition_penalty 1.0, frequency_penalty 0 and presence_penalty 0; what a"
        " paused response has decoded behind its call would stay counted",
    ),
    Rule(
        ("rollout.stop", "tools"),
        stop_in_closing,
        "rollout.stop: {found!r} is part of tools.closing, so responses would end before any call",
    ),
    Rule(
        ("tools", "task"),
        mistaken_answer,
        "tools.answer_opening: {0.answer_opening!r} is where {found} looks for the policy's answer; take"
        " another marker",
    ),
)
_SPECULATION = (
    Rule(
        ("speculation.args", "speculation.drafter"),
        lambda args, drafter: drafter is None and next(iter(args), None),
        "speculation.args.{found}: there is no drafter that would read it; set speculation.drafter, or"
        " speculation.args={{}}",
    ),
    Rule(
        ("speculation.others", "speculation.drafter"),
        first_alone,
        "speculation.others: needs a first drafter; set speculation.drafter",
    ),
    Rule(
        ("speculation.drafter", "speculation.others"),
        lambda drafter, others: drafter in others,
        "speculation.others: {0} is speculation.drafter already",
    ),
    Rule(
        ("speculation.mix", "speculation.others", "speculation.choice"),
        lambda mix, others, choice: mix and (choice not in readers_of("mix") or not others),
        "speculation.mix: needs speculation.others, and speculation.choice:"
        f" {' or '.join(readers_of('mix'))}",
    ),
    Rule(
        ("speculation.mix", "speculation.strategies", "speculation.drafters"),
        lambda mix, strategies, drafters: mix and strategies and "+".join(drafters),
        "speculation.mix: adds to the default strategies; in speculation.strategies name what is mixed, as"
        " {{drafter: {found}, ...}}",
    ),
    Rule(
        ("speculation.strategies", "speculation.choice"),
        lambda strategies, choice: strategies and choice not in readers_of("strategies"),
        "speculation.strategies: only speculation.choice:"
        f" {' or '.join(readers_of('strategies'))} reads them",
    ),
    Rule(
        ("speculation.choice", "speculation.strategies"),
        lambda choice, strategies: choice == "fixed" and len(strategies) != 1 and str(len(strategies)),
        "speculation.choice: fixed needs one strategy in speculation.strategies, got {found}",
    ),
    *(rule for policy in POLICIES.values() for rule in policy.rules),
    Rule(
        ("speculation.kinds", "engine.verification"),
        lambda kinds, verification: "quantized" in kinds.values() and verification != "coupled",
        "speculation.drafter: quantized needs engine.verification: coupled, got {1}; how much of a chain is"
        " verified depends on its noise",
    ),
    Rule(
        ("speculation.max_drafts",),
        lambda drafts: drafts >= MAX_NODES,
        f"speculation.max_drafts: {{0}} is more than {MAX_NODES - 1}",
    ),
)
_ALGORITHM = (
    Rule(
        ("algorithm.advantage_normalization", "algorithm.advantage_baseline", "algorithm.compares_groups"),
        lambda normalization, baseline, compares: normalization == "std" and not compares,
        "algorithm.advantage_normalization: std is that of a group, but advantage_baseline {1} compares no"
        " groups; use batch or none",
    ),
    Rule(
        ("algorithm.ratio", "algorithm.advantage_baseline", "algorithm.compares_groups"),
        lambda ratio, baseline, compares: ratio == "sequence" and not compares,
        "algorithm.ratio: sequence gives all tokens of a response one gradient, but advantage_baseline {1}"
        " gives every token a separate advantage; use token",
    ),
    Rule(
        ("algorithm.discount", "algorithm.advantage_baseline", "algorithm.compares_groups"),
        lambda discount, baseline, compares: discount != 1 and compares,
        "algorithm.discount: {0} is read with advantage_baseline none or critic, not with {1}",
    ),
    Rule(
        ("algorithm.dynamic_sampling_part", "algorithm.dynamic_sampling"),
        first_alone,
        "algorithm.dynamic_sampling_part: is not used without algorithm.dynamic_sampling; set both",
    ),
    Rule(
        ("algorithm.teacher", "algorithm.kl_coefficient"),
        first_alone,
        "algorithm.teacher: is not used with algorithm.kl_coefficient 0; raise that",
    ),
    *(  # expected gradients near the reference: docs/algorithms.md, "KL as a penalty"
        Rule(
            ("algorithm.kl_estimator", "algorithm.kl_in", "algorithm.kl_coefficient"),
            broken,
            "algorithm.kl_estimator: {0} with kl_in: {1} does not hold the policy near the reference; use "
            + right,
        )
        for right, broken in (
            ("k1", lambda kind, place, weight: weight and place == "reward" and kind != "k1"),
            ("k2 or k3", lambda kind, place, weight: weight and place == "loss" and kind == "k1"),
        )
    ),
    Rule(
        ("algorithm.dynamic_sampling", "rollout.samples_per_prompt"),
        lambda dynamic, samples: dynamic and samples < 2,
        "algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2, got 1; a group of one"
        " always has equal rewards, so no batch would ever fill",
    ),
    Rule(
        ("algorithm.name", "algorithm.teacher"),
        lambda name, teacher: name in NEED_TEACHER and teacher is None,
        "algorithm.teacher: {0} needs one; give the directory of a model with the policy's tokenizer, or of a"
        " run",
    ),
    Rule(
        ("rollout.samples_per_prompt", "algorithm.compares_groups"),
        lambda samples, compares: samples < 2 and compares,
        "rollout.samples_per_prompt: 1 makes every advantage 0 (rewards are compared within the group); set"
        " at least 2",
    ),
    Rule(
        ("algorithm.overlong_buffer", "rollout.max_response_length"),
        lambda buffer, length: buffer >= length,
        "algorithm.overlong_buffer: {0} must be less than rollout.max_response_length {1}",
    ),
)
_LEARNING = (
    Rule(
        ("training.pack_length", *_LENGTHS),
        lambda row, *lengths: row < sum(lengths) and sum(lengths),
        "training.pack_length: {0} is less than rollout.max_prompt_length + max_response_length = {found}; a"
        " row must hold the longest sequence",
    ),
    Rule(
        ("training.minibatches_per_step", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
        lambda updates, prompts, samples: updates > prompts * samples and prompts * samples,
        "training.minibatches_per_step: {0} is more than the {found} responses of a step"
        " (rollout.prompts_per_step * samples_per_prompt)",
    ),
    Rule(
        ("evaluation.pass_at", "evaluation.samples"),
        lambda pass_at, samples: pass_at and pass_at[-1] > samples and pass_at[-1],
        "evaluation.pass_at: {found} is more than evaluation.samples {1}",
    ),
    Rule(
        ("evaluation.sampling_changes", "engine.verification"),
        lambda changes, verification: verification != "coupled" and next(iter(changes), None),
        "evaluation.{found}: needs engine.verification: coupled, got {1}; the other rules sample every"
        " request alike",
    ),
    Rule(
        ("checkpoint.keep_best", "evaluation.every", "evaluation.problems"),
        lambda keep, every, problems: keep and not (every and problems),
        "checkpoint.keep_best: needs evaluation.every and evaluation.problems above 0; the best by held-out"
        " reward are kept",
    ),
)
_ENGINE = (
    Rule(
        ("engine.weights", "mesh.fsdp"),
        lambda weights, fsdp: weights == "fsdp" and fsdp == 1,
        "engine.weights: fsdp splits the weights over mesh.fsdp, which is 1; set replicated, or raise"
        " mesh.fsdp",
    ),
    Rule(
        ("engine.batch_buckets", "engine.max_slots"),
        lambda buckets, slots: misfit(buckets, slots, f"engine.max_slots {slots}"),
        "engine.batch_buckets: {found}",
    ),
    Rule(
        ("engine.cache_buckets", *_LENGTHS),
        lambda buckets, *lengths: misfit(
            buckets,
            sum(lengths),
            f"rollout.max_prompt_length + max_response_length = {sum(lengths)}",
        ),
        "engine.cache_buckets: {found}",
    ),
    Rule(
        ("kernels.packed_attention", "engine.row_invariant"),
        lambda names, invariant: invariant and ", ".join(each for each in names or () if each != "xla"),
        "kernels.packed_attention: {found} has other bits than decoding, and engine.row_invariant is {1}; set"
        " that to false, or name xla",
    ),
    Rule(
        ("kernels.packed_attention", "training.share_prompts"),
        lambda names, share: share != "off" and "xla" not in (names or ("xla",)) and ", ".join(names),
        "kernels.packed_attention: {found} knows no responses that share a prompt; set"
        " training.share_prompts=off, or name xla after it",
    ),
    Rule(
        ("speculation.verify_buckets",),
        lambda buckets: misfit(buckets, 4, "a pass over two responses"),
        "speculation.verify_buckets: {found}",
    ),
)
_STALENESS = (
    Rule(
        ("rollout.staleness", "rollout.max_staleness"),
        both,
        "rollout.max_staleness: is another mode than staleness: 1; set one of them to 0 (staleness: 1 can be"
        " repeated without a log)",
    ),
    Rule(
        ("rollout.max_staleness", "cluster.workers", "cluster.replay"),
        lambda staleness, workers, replay: staleness and not workers and replay is None,
        "rollout.max_staleness: needs cluster.workers; without them nothing is decoded during an update, and"
        " rollout.staleness: 1 does the same",
    ),
    Rule(
        ("rollout.max_staleness", "algorithm.dynamic_sampling"),
        both,
        "rollout.max_staleness: is not possible with algorithm.dynamic_sampling; set that to false, or use"
        " rollout.staleness: 1",
    ),
    Rule(
        ("cluster.replay", "rollout.max_staleness"),
        first_alone,
        "cluster.replay: repeats a run with rollout.max_staleness; set that as it was there (other runs are"
        " repeated by their config alone)",
    ),
    Rule(
        ("rollout.max_staleness", "tools"),
        both,
        "rollout.max_staleness: is not possible with tools; leave one of them out",
    ),
)
_PROCESSES = (
    Rule(
        ("distributed.coordinator", "distributed.processes", "distributed.process"),
        missing_keys,
        "distributed.{found}; set all three, or none where a launcher starts the processes",
    ),
    Rule(
        ("distributed.process", "distributed.processes"),
        lambda process, processes: None not in (process, processes) and process >= processes,
        "distributed.process: {0} must be less than distributed.processes {1}; processes count from 0",
    ),
    *(rule for each in MECHANISMS.values() for rule in each.rules),
    Rule(
        ("cluster.weights_dir", "cluster.weights"),
        lambda directory, weights: directory is not None and weights != "files",
        "cluster.weights_dir: is not used with cluster.weights: {1}; set files",
    ),
)
_AGENTS = tuple(
    Rule(
        ("agents", key),
        lambda agents, value, used=used: agents is not None and used(value),
        f"{key}: is not supported with agents: {instead}",
    )
    for key, used, instead in (
        ("tools", bool, "agents have tools of their own; leave the section out"),
        ("cluster.workers", bool, "the server decodes in this process; set 0"),
        (
            "distributed",
            lambda distributed: distributed.is_wanted(),
            "one process serves; set distributed.enabled=off",
        ),
        ("speculation.overlap", bool, "requests join at any time; set false"),
        ("algorithm.overlong_buffer", bool, "set 0"),
        (
            "engine.verification",
            lambda verification: verification != "coupled",
            "tokens would depend on earlier requests; set coupled",
        ),
    )
)
CONTRADICTIONS = (
    *(*_POLICY, *_TASK_AND_TOOLS, *_SPECULATION, *_ALGORITHM),
    *(*_LEARNING, *_ENGINE, *_STALENESS, *_PROCESSES, *_AGENTS),
)
"""What no experiment can have, wherever it runs."""

WITH_WORKERS = (
    *(rule for each in MECHANISMS.values() for rule in each.with_workers),
    Rule(
        ("engine.row_invariant",),
        lambda invariant: not invariant,
        "engine.row_invariant: is not supported with cluster.workers: bits would depend on who decodes; set"
        " true",
    ),
    Rule(
        ("cluster.weights", "distributed"),
        lambda weights, distributed: weights == "jax_transfer" and distributed.is_wanted(),
        "cluster.weights=jax_transfer: is not supported with cluster.workers: the devices of one process"
        " send, and several train; set object_store or files",
    ),
    Rule(
        ("cluster.gpus_per_worker", "cluster.mesh.num_devices", "speculation.drafting_devices"),
        lambda gpus, devices, drafting: (
            gpus not in (0, devices + drafting)
            and (f"{devices} devices" + (f" and speculation.decoupled {drafting}" if drafting else ""))
        ),
        "cluster.gpus_per_worker={0}: is not supported with cluster.workers: cluster.mesh has {found}; set as"
        " many",
    ),
    Rule(
        ("cluster.mesh.num_devices", "cluster.numerics"),
        lambda devices, numerics: devices > 1 and numerics == "refuse",
        "cluster.mesh: is not supported with cluster.workers: without cluster.numerics=warn, since bits are"
        " not measured on several devices",
    ),
)
"""What does not work where workers decode the rollouts of training."""

OVER_PROCESSES = (
    Rule(
        ("tools",),
        bool,
        "tools: decides by the clock of one process, which several processes cannot share; leave the section"
        " out",
    ),
    Rule(
        ("speculation.by_one_clock", "speculation.drafter"),
        lambda keys, drafter: drafter is not None and next(iter(keys), None),
        "{found}: decides by the clock of one process, which several processes cannot share; set 0",
    ),
    *(
        Rule((key,), bool, f"{key}: is for one process that trains, not for several; set 0")
        for key in ("rollout.staleness", "rollout.max_staleness")
    ),
)
"""What does not work where several processes train."""
