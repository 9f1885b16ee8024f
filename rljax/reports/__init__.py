"""Reports of runs: report.html, figures, and a summary in words.

runs.py        what a run directory holds, read once; runs that differ by their seed alone, as one series
figures.py     colours, and how figures become files or parts of a page
learning.py    drawn: rewards, held-out rewards, mismatch, and any metric over the steps
rollouts.py    drawn: response lengths, and how many requests ran when
speed.py       drawn: where a step's time goes, tokens per second, accept lengths
decisions.py   drawn and in words: what the rollout manager decided
page.py        all of it as one HTML file
"""

from rljax.reports.page import write_report, write_report_of_run

__all__ = ["write_report", "write_report_of_run"]
