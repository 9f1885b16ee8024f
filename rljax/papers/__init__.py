"""The wing of the papers: what a paper proposes and the default path does not need, a folder a paper.

    tlt/                 TLT (FastRL): a bandit over strategies, and a head that idle workers train
    rhymerl/             RhymeRL: HistoPipe and two tiers, who decodes what by the lengths of the epoch before
    efficient_rollout/   EfficientRollout: a roofline that switches drafts on, and their length
    specactor/           SpecActor: the draft ladder, races for stragglers, in a process and over workers, and
                         drafting ahead
    srt/                 SRT: idle slots and idle workers sample requests of the next step, for drafts

Each folder begins with the paper's algorithm and its keys. Nothing outside, `scripts` included, imports
from here but `rljax/config/wing.py`, and that only `registry.py`: without this folder the rest works, and has
fewer keys.
"""

import rljax.config  # noqa: F401  its keys are complete with those in here, so it comes first
