"""What a real run leaves to be seen, in two sessions."""

import pytest

from rljax.run_directory import RunDirectory
from tests.tracking.test_tensorboard import scalars
from tests.training.tiny_run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two sessions, the first of one step."""
    directory = tmp_path_factory.mktemp("tracked")
    keys = ["tracking.report=true", "tracking.samples_per_step=2"]
    train(directory, *keys, "training.steps=1")
    train(directory, *keys, "training.steps=2")
    return RunDirectory(directory / "run")


def test_tensorboard_has_what_the_metrics_have(run):
    lines = run.read_metrics()
    expected = {
        (line["step"], name): value for line in lines for name, value in line.items() if name != "step"
    }
    found = scalars(run)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_every_step_leaves_its_rollout(run):
    """Two prompts with four responses each."""
    lines, metrics = run.read_rollouts(), run.read_metrics()
    assert [line["step"] for line in lines] == [1, 2]
    for line, own in zip(lines, metrics[1:], strict=True):
        assert sum(line["lengths"]["counts"]) == 8
        assert len(line["lengths"]["counts"]) == own["response_length/max"]  # bins of one token
        (points,) = line["running"]
        assert 0 < points[-1][0] <= own["time/rollout"]
        assert max(running for _, running in points) == 4  # slots
        assert len(line["best"]) == 2 and 1 <= len(line["best"]) + len(line["worst"]) <= 4
        rewards = [each["rewards"]["reward"] for each in line["best"] + line["worst"]]
        assert max(rewards) == rewards[0] and min(rewards) <= own["reward/mean"] <= rewards[0]
        assert all("=" in each["prompt"] for each in line["best"])
    for line in metrics[1:]:  # percentiles and spread
        lengths = [line[f"response_length/{name}"] for name in ("p50", "p75", "p95", "max")]
        assert lengths == sorted(lengths)
        assert line["reward/standard_error"] >= 0 and line["reward/std"] >= 0


def test_the_run_ends_with_a_report(run):
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert 'aria-label="Running requests"' in text and text.count("<details") > 3
