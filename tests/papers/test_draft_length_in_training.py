"""A whole run in which EfficientRollout's draft length falls and climbs, and that changes no number of it."""

from rljax.papers.efficient_rollout import manager as roofline_manager
from rljax.run_directory import RunDirectory
from rljax.tasks.chain_arithmetic import ChainArithmetic
from tests.scripts import load_script
from tests.training.tiny_run import ONE_PASS, train

ascending = load_script("rollout_benchmarks.ascending").ascending
always_pays = load_script("rollout_benchmarks.counts").always_pays

STEPS = 16
HOW = ("time/", "speculation/", "engine/", "rollout/")  # what may differ, but for the tokens
DRAFTS = (
    "speculation.drafter=quantized",
    "speculation.args.bits=4",
    "speculation.choice=roofline",
    *ONE_PASS,
    "speculation.toggle={lengths: [1, 2, 3], first: 3, alpha_up: 0.985, alpha_down: 0.97}",
)


def run(directory, *overrides):
    """Numbers and draft lengths, by step, of a run that learns to count."""
    directory.mkdir()
    fixed = (f"training.steps={STEPS}", "optimizer.learning_rate=1e-2", "checkpoint.every=0")
    lines = train(directory, *fixed, "evaluation.problems=0", *overrides)
    numbers = [
        {name: value for name, value in line.items() if not name.startswith(HOW)}
        | {"tokens": line["rollout/tokens"]}
        for line in lines
        if "rollout/tokens" in line
    ]
    decisions = RunDirectory(directory / "run").read_decisions()
    lengths = [max(len(decision["verified"]) for decision in step) for _, step in decisions]
    return numbers, lengths


def test_drafts_get_shorter_where_they_are_rejected_and_longer_as_the_policy_grows_sure(
    tmp_path, monkeypatch
):
    counting = lambda self, problem, text: {"reward": ascending(text)}  # noqa: E731
    monkeypatch.setattr(ChainArithmetic, "reward", counting)
    always = lambda engine, drafter, _: always_pays(engine, drafter)  # noqa: E731
    monkeypatch.setattr(roofline_manager, "roofline_of", always)
    plain, _ = run(tmp_path / "plain")
    drafted, lengths = run(tmp_path / "drafted", *DRAFTS)
    assert drafted == plain
    assert len(lengths) == STEPS and lengths[0] == 3
    shortest = lengths.index(min(lengths))
    assert lengths[: shortest + 1] == sorted(lengths[: shortest + 1], reverse=True)
    assert lengths[shortest:] == sorted(lengths[shortest:])
    assert min(lengths) < 3 and lengths[-1] > min(lengths)
    assert plain[-1]["entropy"] < plain[0]["entropy"] / 4  # that is why


def test_the_reward_counts_digits_that_follow_each_other():
    rewards = {"": 0, "7": 0, "789012": 1, "12a34": 0.5, "21": 0, "٣٤": 0}
    assert {text: ascending(text) for text in rewards} == rewards
