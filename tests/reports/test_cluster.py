"""The section on rollout workers is there where a run had some."""

from rljax.reports import page
from rljax.reports.runs import read_run
from tests.synthetic_run import write_full_run


def test_a_run_with_workers_has_a_section_of_its_own(tmp_path):
    run = read_run(write_full_run(tmp_path / "run", steps=3, drafts=False))
    assert "Rollout workers" not in page.report_html([run])
    for line in run.steps:
        line |= {
            "cluster/workers": 2,
            "cluster/busy_share": 0.8,
            "cluster/idle_share": 0.5,
            "cluster/fetch_seconds": 0.1,
            "cluster/restarts": 1,
            "cluster/migrations": 4,
        }
    text = page.report_html([run])
    assert "<h2>Rollout workers</h2>" in text
    assert "3 were lost, and 12 responses went on elsewhere." in text
    for title in ("Workers", "Busy in rollouts", "Idle over the step", "Weights to the workers"):
        assert f'aria-label="{title}"' in text
