"""Reports of runs: report.html, figures, and a summary in words.

runs.py        reads run directories; groups runs that differ only by their seed into series
figures.py     colours, and writing figures to files or into a page
learning.py    figures of rewards, held-out rewards, mismatch, and any metric over the steps
rollouts.py    figures of response lengths, and of running requests over time
speed.py       figures of a step's time, tokens per second, accept lengths
cluster.py     figures of rollout workers
decisions.py   figures and sentences about the rollout manager's decisions
page.py        the report as one HTML file
"""

from rljax.reports.page import write_report, write_report_of_run

__all__ = ["write_report", "write_report_of_run"]
