"""The section on rollout workers is there where a run had some."""

from rljax.reports import page
from rljax.reports.runs import read_run
from rljax.run_directory import RunDirectory
from tests.synthetic_run import write_full_run


def record(begin, worker="worker-1"):
    spans = [[0.0, 1.5, "loading"], [1.5, 4.0, "decoding"], [4.0, 5.0, "idle"]]
    return {
        "seconds": 5.0,
        "moved": 1,
        "rows": {
            "trainer": {"spans": [[0.0, 4.0, "waiting"], [4.0, 5.0, "training"]]},
            "worker-0": {"spans": spans, "tokens": 1200, "responses": 7},
            worker: {"spans": [[begin, 2.0, "starting"]], "tokens": 0, "responses": 0},
        },
    }


def test_a_run_with_workers_has_a_section_and_a_timeline_of_its_own(tmp_path):
    """Of the newest steps, and who decoded what."""
    path = write_full_run(tmp_path / "run", steps=6, drafts=False)
    directory = RunDirectory(path)
    for step in range(1, 7):
        directory.append_workers(step, record(step / 10, f"worker-{step}"))
    run = read_run(path)
    for line in run.steps:
        line |= {"cluster/busy_share": 0.8, "cluster/idle_share": 0.5, "cluster/fetch_seconds": 0.1}
        line |= {"cluster/workers": 2, "cluster/restarts": 1, "cluster/migrations": 4}
    text = page.report_html([run])
    assert "<h2>Rollout workers</h2>" in text
    assert "6 were lost, and 24 responses went on elsewhere." in text
    for title in ("Workers", "Busy in rollouts", "Idle over the step", "Weights to the workers"):
        assert f'aria-label="{title}"' in text
    assert 'aria-label="Workers over time"' in text
    assert "in steps 3 to 6" in text and "4 responses are of several workers" in text
    for shown in ("trainer", "worker-0, 4,800 tok", "worker-3", "worker-6", "decoding", "idle, waiting"):
        assert f">{shown}<" in text
    assert ">worker-2<" not in text

    directory.truncate_after(4)  # the run resumes from step 4
    assert [line["step"] for line in directory.read_workers()] == [1, 2, 3, 4]
