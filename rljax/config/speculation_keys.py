"""Keys of speculative decoding that do not belong to a single policy, and what a policy is known by.

A policy decides how much is drafted. One with keys of its own has a class that extends `SpeculationKeys`.
"""

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from rljax.config.section import Buckets, Count, Rule, Section


class SpeculationKeys(Section):
    """Keys that do not belong to a single policy; in a policy's class, with its own keys after them."""

    drafter: str | None = Field(
        None,
        min_length=1,
        description="Drafter that proposes tokens: prompt_lookup, srt, histospec, suffix_decoding,"
        " quantized, eagle, block, small_model, or a class of yours as module:Class; null decodes"
        " without drafts. Set srt for prompts that return and groups of samples; quantized (the"
        " policy in fewer bits), eagle or block (heads trained beside it, which draft token by token"
        " or in one pass) or small_model (a smaller model) also for new prompts.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the drafter, by name; see docs/drafters.md."
    )
    others: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Further drafters by name, with their arguments; before every pass the manager chooses"
        " one. Add eagle or quantized to srt where some prompts are new and others return. kind among the"
        " arguments says which drafter it is, for several of a kind: tiny: {kind: small_model}; without it,"
        " the name does.",
    )
    choice: str = "expected"  # described where the policies are known
    mix: bool = Field(
        False,
        description="Verify drafts of several drafters as one tree: with choice: expected wherever several"
        " have drafted, with choice: bandit as further strategies. Set it where drafters fail at"
        " different tokens and verification is cheap.",
    )
    strategies: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Strategies of choice: bandit, as a list of {drafter, depth, top_k, nodes}; drafter:"
        " srt+eagle mixes their trees, and an empty list takes a few sizes of every drafter."
        " With choice: fixed, the one strategy. Set it to restrict the bandit to promising ones.",
    )
    verify_buckets: Buckets = Field(
        (8, 16, 32, 64, 128),
        description="Compiled sizes of a verifying pass, in tokens over all responses, ascending; before"
        " every pass the best predicted size is chosen. Add larger ones where memory bandwidth,"
        " not arithmetic, is the limit.",
    )
    max_drafts: Count = Field(
        15,
        description="Most draft tokens of one response in a pass. Raise it where long drafts are accepted;"
        " attention is always computed for this many.",
    )
    max_batch: Count = Field(
        16,
        description="Largest batch that is decoded with drafts. Raise it on devices where verifying many"
        " responses at once is cheap; every batch bucket up to it compiles more programs.",
    )
    overlap: bool = Field(
        False,
        description="Draft for one half of the responses while the device verifies the other half. Set it"
        " where drafting takes much of a pass (speculation/idle_share), but not where reading"
        " the weights dominates: two half passes then cost nearly two whole ones.",
    )

    @model_validator(mode="after")
    def _check_drafters(self) -> "SpeculationKeys":
        for name, args in self.others.items():
            if "kind" not in args:
                continue
            if not isinstance(args["kind"], str):
                raise ValueError(
                    f"speculation.others.{name}.kind: should be a drafter's name, got {args['kind']!r}"
                )
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(
                    f"speculation.others: {name!r} is no name for a drafter; use letters, digits, - and _"
                )
        return self

    @property
    def drafters(self) -> list[str]:
        """The names of all drafters."""
        return [] if self.drafter is None else [self.drafter, *self.others]

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every drafter, by its name."""
        first = {} if self.drafter is None else {self.drafter: self.drafter}
        return first | {name: args.get("kind", name) for name, args in self.others.items()}

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of every drafter, by its name, without its kind."""
        first = {} if self.drafter is None else {self.drafter: self.args}
        return first | {
            name: {key: value for key, value in args.items() if key != "kind"}
            for name, args in self.others.items()
        }

    @property
    def policy(self) -> str:
        """The name in `POLICIES` of what decides how much is drafted."""
        return self.choice

    @property
    def drafting_devices(self) -> int:
        """Number of devices that draft and do nothing else."""
        return 0

    @property
    def fills_idle_slots(self) -> str:
        """The key by which idle slots decode requests of later rollouts; empty where they stay idle."""
        return ""

    @property
    def by_one_clock(self) -> tuple[str, ...]:
        """Keys by which the clock of one process decides, so that several processes cannot agree."""
        return ()


class Policy(NamedTuple):
    """What decides before every pass how much is drafted and verified.

    Attributes:
      manager: where its class is, as `module:Class`; imported when a run chooses it.
      way: how it chooses, for --help; empty where other keys than `speculation.choice` choose it.
      reads: those of the keys `mix` and `strategies` that it reads.
      drafters: where the function is that makes its drafters, as `module:function`; empty for the usual ones.
      rules: its keys that contradict each other, or others.
    """

    keys: type[SpeculationKeys]
    manager: str
    way: str = ""
    reads: tuple[str, ...] = ()
    drafters: str = ""
    rules: tuple[Rule, ...] = ()
