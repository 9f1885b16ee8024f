"""The policies of the papers by name, without JAX: the one way from the rest of the code to them."""

from rljax.config.speculation_keys import Policy
from rljax.papers import efficient_rollout, specactor, tlt

POLICIES = {
    "bandit": Policy(
        tlt.TltKeys,
        "rljax.papers.tlt.bandit:BanditManager",
        "by a bandit over strategies (TLT's BEG-MAB)",
        ("mix", "strategies"),
        rules=tlt.RULES,
    ),
    "roofline": Policy(
        efficient_rollout.EfficientRolloutKeys,
        "rljax.papers.efficient_rollout.manager:RooflineManager",
        "with one drafter, by EfficientRollout's roofline and draft length schedule",
        rules=efficient_rollout.RULES,
    ),
    "ladder": Policy(
        specactor.SpecActorKeys,
        "rljax.papers.specactor.best_of_n:LadderManager",
        "by SpecActor's draft ladder, once per rollout, and by races for its stragglers",
    ),
    "decoupled": Policy(
        specactor.SpecActorKeys,
        "rljax.papers.specactor.decoupled:DecoupledManager",
        drafters="rljax.papers.specactor.drafters:make_ahead",
        rules=specactor.RULES,
    ),
}
