"""What the papers add, by name and without JAX: the one way from the rest of the code to them."""

from rljax.config.cluster_keys import Mechanism
from rljax.config.speculation_keys import Policy, SpeculationKeys
from rljax.papers import efficient_rollout, rhymerl, specactor, srt, tlt

POLICIES = {
    "cutoff": Policy(
        SpeculationKeys,
        "rljax.papers.rhymerl.cutoff:CutoffManager",
        "with one drafter, up to the largest batch that RhymeRL's table has for its acceptance",
        rules=rhymerl.CUTOFF_RULES,
    ),
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
"""How much is drafted."""

MECHANISMS = {
    "srt": Mechanism(
        speculation=srt.SrtKeys,
        of_steps=srt.OF_STEPS,
        idle_requests="rljax.papers.srt.run_ahead:make_run_ahead",
        extras="rljax.papers.srt.plans:make_extras",
        idle_work="rljax.papers.srt.ahead:make_driver",
        idle_worker="rljax.papers.srt.ahead:make_worker",
        rules=srt.RULES,
        with_workers=srt.WITH_WORKERS,
    ),
    "rhymerl": Mechanism(
        rhymerl.RhymeKeys,
        routing="rljax.papers.rhymerl.routing:HistoPipe",
        rules=rhymerl.RULES,
        with_workers=rhymerl.WITH_WORKERS,
    ),
    "specactor": Mechanism(
        specactor.RaceKeys,
        routing="rljax.papers.specactor.racing:Races",
        with_workers=specactor.RACES_WITH_WORKERS,
    ),
    "tlt": Mechanism(
        tlt.SpotKeys,
        idle_work="rljax.papers.tlt.spot_driver:make_driver",
        idle_worker="rljax.papers.tlt.spot_worker:make_worker",
        rules=tlt.SPOT_RULES,
        with_workers=tlt.SPOT_WITH_WORKERS,
    ),
}
"""What else is added to rollouts. What one puts around a router comes around that of those before."""

PARTS = {
    "RankedQueues": "rljax.papers.rhymerl.histopipe:RankedQueues",
    "Migrating": "rljax.papers.rhymerl.histopipe:Migrating",
    "OutlierRule": "rljax.papers.rhymerl.histopipe:OutlierRule",
    "growth_factor": "rljax.papers.rhymerl.histopipe:growth_factor",
    "tier_sizes": "rljax.papers.rhymerl.two_tiers:tier_sizes",
    "Profile": "rljax.papers.specactor.planner:Profile",
    "plan": "rljax.papers.specactor.planner:plan",
    "Racing": "rljax.papers.specactor.racing:Racing",
    "SpotRule": "rljax.papers.tlt.spot:SpotRule",
    "SpotTraining": "rljax.papers.tlt.spot:SpotTraining",
    "SpotTimes": "rljax.papers.tlt.simulated_spot:SpotTimes",
    "SimulatedSpot": "rljax.papers.tlt.simulated_spot:SimulatedSpot",
    "Roofline": "rljax.papers.efficient_rollout.roofline:Roofline",
    "policy_costs": "rljax.papers.efficient_rollout.roofline:policy_costs",
    "StepAcceptance": "rljax.papers.efficient_rollout.draft_length:StepAcceptance",
    "measure_roofline": "rljax.papers.efficient_rollout.calibration:measure_roofline",
    "calibrate_run": "rljax.papers.efficient_rollout.report:calibrate_run",
}
"""What the simulator and scripts take of them."""
