"""The policies of the papers by name, without JAX: the one way from the rest of the code to them."""

from rljax.config.speculation_keys import Policy
from rljax.papers.efficient_rollout import EfficientRolloutKeys
from rljax.papers.specactor import SpecActorKeys
from rljax.papers.tlt import TltKeys

POLICIES = {
    "bandit": Policy(
        TltKeys,
        "rljax.papers.tlt.bandit:BanditManager",
        "by a bandit over strategies (TLT's BEG-MAB)",
        ("mix", "strategies"),
    ),
    "roofline": Policy(
        EfficientRolloutKeys,
        "rljax.papers.efficient_rollout.manager:RooflineManager",
        "with one drafter, by EfficientRollout's roofline and draft length schedule",
    ),
    "ladder": Policy(
        SpecActorKeys,
        "rljax.papers.specactor.best_of_n:LadderManager",
        "by SpecActor's draft ladder, once per rollout, and by races for its stragglers",
    ),
    "decoupled": Policy(
        SpecActorKeys,
        "rljax.papers.specactor.decoupled:DecoupledManager",
        drafters="rljax.papers.specactor.drafters:make_ahead",
    ),
}
