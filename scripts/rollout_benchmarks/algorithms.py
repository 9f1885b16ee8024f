"""SRT by algorithm (Table 1 of its paper) and by responses to a prompt (Table 3): tokens of a forward pass.

Every case is the workload with the algorithm of its name, rolled out plainly and with the paper's three
drafters while the policy trains; prompts return in every second step. Prompts and responses of a step have
about the proportions of its Table 2: an algorithm with a critic has one response to a prompt. The paper's
four are PPO, GRPO, DAPO and ReTool, which is PPO with tools: here that is the calculator's task.

Whatever a drafter has is verified, up to so many nodes, so that passes follow from the tokens alone and not
from a machine's times: on a small policy the default manager would rightly verify nothing.
"""

from collections.abc import Iterator, Sequence

from rljax.benchmarking import Row, counted_row
from rljax.config import ExperimentConfig, load_config
from rljax.requests import DecodeStatistics
from rljax.training.compiling import compile_programs
from rollout_benchmarks.variants import PLAIN, make_variant, open_run, trained_steps

_TOOLS = "configs/tools.yaml"
CASES: dict[str, tuple[str, int, int]] = {  # algorithm, prompts of a step, responses to each
    "PPO": ("ppo", 32, 1),
    "GRPO, 5 responses": ("grpo", 8, 5),
    "GRPO, 10 responses": ("grpo", 8, 10),
    "DAPO": ("dapo", 8, 16),
    "PPO with tools": ("ppo", 32, 1),
}
_DRAFTERS = {"n-gram": "prompt_lookup", "SuffixDecoding": "suffix_decoding", "SRT": "srt"}
_STEPS_OF_AN_EPOCH = 2


def algorithm_rows(file: str, overrides: Sequence[str]) -> list[Row]:
    """Counts the tokens of a forward pass for each case and drafter, against plain decoding.

    Args:
      file: the workload; that of "PPO with tools" is configs/tools.yaml.
      overrides: keys of both.
    """
    return [row for name, config in configs(file, overrides) for row in _rows(name, config)]


def configs(file: str, overrides: Sequence[str]) -> Iterator[tuple[str, ExperimentConfig]]:
    """Yields the name and the config of every case."""
    for name, (algorithm, prompts, responses) in CASES.items():
        keys = (
            f"algorithm.name={algorithm}",
            f"rollout.prompts_per_step={prompts}",
            f"rollout.samples_per_prompt={responses}",
            f"task.problems={_STEPS_OF_AN_EPOCH * prompts}",
            "speculation.drafter=srt",
        )
        yield name, load_config(_TOOLS if "tools" in name else file, [*overrides, *keys])


def _rows(name: str, config: ExperimentConfig) -> list[Row]:
    nodes, steps = config.speculation.max_drafts, config.training.steps
    with open_run(config) as (run, progress):
        compile_programs(run, wait=True)
        times, plain = {}, make_variant(run, PLAIN, None, {})
        variants = [
            make_variant(
                run,
                drafter,
                {
                    "drafter": kind,
                    "choice": "fixed",
                    "strategies": [{"drafter": kind, "depth": nodes, "top_k": nodes, "nodes": nodes}],
                },
                times,
            )
            for drafter, kind in _DRAFTERS.items()
        ]
        for _ in trained_steps(run, progress, plain, variants):
            pass
    epochs = {
        "first epoch": slice(0, _STEPS_OF_AN_EPOCH),
        **({"later epochs": slice(_STEPS_OF_AN_EPOCH, steps)} if steps > _STEPS_OF_AN_EPOCH else {}),
    }
    return [
        _row(f"algorithms/{name}/{when}/{variant.name}", variant.total(which), plain.total(which))
        for when, which in epochs.items()
        for variant in variants
    ]


def _row(name: str, total: DecodeStatistics, plain: DecodeStatistics) -> Row:
    return counted_row(
        name,
        total.tokens / total.steps,
        plain.tokens / plain.steps,
        "tokens a forward pass",
        "plain decoding",
        tokens=total.tokens,
        passes=total.steps,
        baseline_passes=plain.steps,
        verifying_passes=total.verified,
        accept_length=total.accept_length,
        acceptance=total.accepted / max(total.drafted, 1),
    )
