"""The papers' figures by simulation: `python scripts/simulate.py --figure all`.

figure.py      what a figure is: published values and inputs, inputs of ours with reasons, a band over these
rhymerl.py     RhymeRL: figures 13, 14, 15 and 18, table 2
specactor.py   SpecActor: figures 11, 13 and 14
tlt.py         TLT: table 3, figure 11
srt.py         SRT: the bubbles that run-ahead generation fills
turn_on.py     not a paper's: which mechanism pays for which shape of workload
"""

from rljax.simulation.figures.figure import Figure, run_figures

__all__ = ["Figure", "run_figures"]
