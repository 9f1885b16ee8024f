"""Arguments of `speculation.drafter: eagle` and `block` (`speculation.args`)."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from drafters.arguments import Arguments
from drafters.eagle.objective import WEIGHTS, HeadTraining, Variant, head_training
from rljax.config.section import PathText
from rljax.errors import ConfigError


class HeadArguments(Arguments):
    """Arguments of every head."""

    path: PathText | None = Field(
        None,
        description="Directory of a trained head (scripts/train_drafter.py), of a published EAGLE checkpoint"
        " or one of vLLM's speculators, or save_dir of another run; null is a new one.",
    )
    depths: list[int] = Field(
        [2, 4, 6],
        min_length=1,
        description="Depths of the trees to choose from before every pass. Deeper ones pay where the head is"
        " right for longer; each compiles a program for every batch bucket.",
    )
    top_k: int = Field(
        2, ge=1, description="Children of a node. More find more of what is sampled, and draft slower."
    )
    nodes: int | None = Field(
        None, ge=1, description="Nodes of a tree that may be verified; null is speculation.max_drafts."
    )
    draft_vocabulary: int | None = Field(
        None,
        ge=2,
        description="Tokens that a new head drafts, by its own LM head: the first of the vocabulary, which"
        " most tokenizers order by frequency, and those that end a response; null is all. Fewer cost less."
        " scripts/train_drafter.py takes those of the rollouts. Not for eagle and hass.",
    )
    train: bool = Field(
        True, description="Keep the head up with the policy. false keeps it as it is: to see what that costs."
    )
    unrolled_steps: int | None = Field(
        None,
        description="How often the head is applied in training, from the second time on to its own output;"
        " null is 1 for eagle, 3 for hass, 7 for eagle3, block_size for block. More draft deeper, and a slice"
        " takes longer.",
    )
    hidden_weight: float | None = Field(
        None,
        description="Weight of the smooth L1 distance from the policy's hidden states; null is 1, and 0 for"
        " eagle3 and block, which cannot have any. Lower it where drafts matter and states do not.",
    )
    cross_entropy_weight: float | None = Field(
        None,
        description="Weight of the cross entropy with the policy's distribution; null is 0.1, and 1 for"
        " eagle3 and block. Lower it where another loss shall decide.",
    )
    reverse_kl_weight: float | None = Field(
        None,
        description="Weight of the reverse KL divergence (OSD), which seeks the policy's likeliest tokens"
        " instead of covering all; null is 0. TLT gains a little by it.",
    )
    lk_weight: float | None = Field(
        None,
        description="Weight of -log of the acceptance rate itself (LK); null is 0. Set it, and the others to"
        " 0, to train for nothing else.",
    )
    tv_weight: float | None = Field(
        None,
        description="Weight of 1 - the acceptance rate (Bebop), by which likelier drafts count more than"
        " by lk_weight; null is 0. Try it on a head that is trained already.",
    )
    coupled_weight: float | None = Field(
        None,
        description="Weight of -log of the drafts of a chain that are accepted under the request's noise;"
        " null is 0. It is what drafting at a temperature above 0 pays by; it sorts the vocabulary. A new"
        " head needs another loss beside it, by which it learns later tokens.",
    )
    sampled_weight: float | None = Field(
        None,
        description="The same by the chance of drafting what the policy has sampled, which takes no sorting"
        " and counts the whole path right; null is 0. Prefer it with a large vocabulary.",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="Of the head. Raise it where the policy moves fast; lower it if loss jumps."
    )
    pack_length: int = Field(
        512, ge=16, description="Tokens of a training row; longer responses are cut. Lower it to save memory."
    )
    rows: int = Field(2, ge=1, description="Rows of a training slice: fewer make shorter slices.")
    buffer_bytes: int = Field(
        1 << 30,
        ge=1,
        description="Host memory for states to train on. At most half is for responses that still run; beyond"
        " it, shorter ones are not trained on, and of finished ones the older are dropped.",
    )
    previous_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the training tokens that comes from the step before (TLT's DataBuffer), whose"
        " long responses are complete. Lower it where the policy moves fast.",
    )
    train_every: int = Field(
        1,
        ge=1,
        description="Train in every n-th step only. Raise it where the head keeps up with the policy anyway.",
    )
    unread_bytes: int = Field(
        1 << 26,
        ge=0,
        description="Device memory for features of plain decoding until drafts are next asked for. Beyond it"
        " the head reads the oldest early, which slows plain decoding. Lower it to save memory.",
    )
    slices: int = Field(
        8,
        ge=0,
        description="Training slices a rollout, at most. More follow the policy closer and take longer.",
    )
    train_below: int = Field(
        4,
        ge=0,
        description="Train inside the rollout's tail, once no more than this many responses still run, and"
        " right behind it, both as train_share allows. 0 trains only behind it and runs all slices there,"
        " so that runs can be repeated exactly.",
    )
    train_share: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Most of the rollouts' time that slices may take, over the run. Raise it while the head"
        " has much to learn and its drafts pay.",
    )
    save_dir: PathText | None = Field(
        None,
        min_length=1,
        description="Directory for the newest weights of the head, written in the background after every"
        " step: for another process to read, or to lose less than a checkpoint's rhythm would. null: none.",
    )
    on_save_failure: Literal["go_on", "stop"] = Field(
        "go_on",
        description="When that cannot be written, on a full disk for example: warn and go on, or stop with an"
        " error. stop where another process waits for the newest weights.",
    )
    seed: int = Field(0, description="Of a new head, and of the order of training.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.depths) < 1:
            raise ValueError(f"depths: should be at least 1, got {min(self.depths)}")
        try:
            steps = self.training.steps
        except ConfigError as error:  # pydantic tells of ValueErrors alone
            raise ValueError(str(error)) from error
        if self.pack_length <= steps + 1:
            raise ValueError(f"pack_length: {self.pack_length} is too short for {steps} unrolled steps")
        return self

    @property
    def training(self) -> HeadTraining:
        """Settings of the head's training data."""
        weights = {name: getattr(self, name) for name in WEIGHTS}
        return head_training(self.variant, self._steps, **weights)

    @property
    def _steps(self) -> int | None:
        """Unrolled steps; None for those of the variant."""
        return self.unrolled_steps

    @property
    def lengths(self) -> dict[str, int]:
        """By key, the most tokens of a draft that it asks for."""
        return {"depths": max(self.depths), "unrolled_steps": self.training.steps}


class EagleArguments(HeadArguments):
    """Arguments of `drafter: eagle`."""

    variant: Literal["eagle", "hass", "eagle3"] = Field(
        "eagle3",
        description="eagle and hass read the policy's last hidden state, eagle3 three. hass and eagle3"
        " train on their own outputs too: dearer steps, longer drafts.",
    )


class BlockArguments(HeadArguments):
    """Arguments of `drafter: block`."""

    variant: ClassVar[Variant] = "block"
    block_size: int = Field(
        8,
        ge=1,
        description="Most tokens of a draft, which one pass computes. Raise it where most are accepted.",
    )
    block_depth: int = Field(
        1, ge=1, description="Decoder layers of a new head. More know the context better, and draft slower."
    )
    block_width: int = Field(
        128,
        ge=1,
        description="Width of the correction of a new head, by which later drafts follow from earlier ones."
        " Wider learns more of that, token by token.",
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        for name, most in self.lengths.items():
            if most > self.block_size:
                raise ValueError(f"{name}: {most} is more than block_size {self.block_size}")
        return self

    @property
    def _steps(self) -> int:
        return self.block_size if self.unrolled_steps is None else self.unrolled_steps
