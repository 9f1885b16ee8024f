"""Keys of the policy: its architecture or checkpoint, how it is grown, and what it learns before RL."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rljax.config.section import Count, Section


class ShapeConfig(Section):
    """Architecture of a policy made from scratch."""

    hidden_size: Count = Field(
        description="Width of the residual stream. Raise for capacity; cost grows with its square."
    )
    num_layers: Count = Field(
        description="Decoder layers. Raise for longer chains of reasoning; decoding time grows in step."
    )
    num_heads: Count = Field(description="Query heads; a multiple of num_kv_heads.")
    num_kv_heads: Count = Field(
        description="Key/value heads. Fewer make the KV cache, and so long decodes, cheaper."
    )
    head_dim: Count = Field(
        description="Size of a head, even; num_heads * head_dim may differ from hidden_size."
    )
    mlp_size: Count = Field(
        description="Width of the SwiGLU layer, where most weights are; about 2.7 times hidden_size is usual."
    )
    rope_theta: float = Field(
        10_000.0,
        gt=0,
        description="Base of the rotary frequencies. Raise for contexts of many thousand tokens.",
    )
    tie_embeddings: bool = Field(
        True, description="Use the embedding as the LM head. Turn off for large models with weights to spare."
    )
    qk_norm: bool = Field(
        True,
        description="Normalise queries and keys (Qwen3); steadier at high learning rates. Off makes a Llama.",
    )
    attention_bias: bool = Field(
        False, description="Bias on the query, key and value projections (Qwen2); excludes qk_norm."
    )
    max_positions: Count = Field(
        4096, description="Longest sequence the policy is made for; raise when prompt and response need more."
    )

    @model_validator(mode="after")
    def _check(self) -> "ShapeConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"policy.shape.num_heads: {self.num_heads} is not a multiple of num_kv_heads"
                f" {self.num_kv_heads};"
                " every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"policy.shape.head_dim: {self.head_dim} is odd; rotary embeddings turn pairs, so it"
                " must be even"
            )
        if self.qk_norm and self.attention_bias:
            raise ValueError(
                "policy.shape.attention_bias: cannot be true together with qk_norm;"
                " Qwen2 has the bias, Qwen3 the norms, and no supported architecture both"
            )
        return self


class GrowthConfig(Section):
    """Make the policy larger after its warm start without changing what it computes: new channels, neurons
    and layers write zeros. For benchmarks: the cost of a large policy with the behaviour of a small one.
    """

    hidden_size: Count = Field(description="Width of the residual stream; products get wider with it.")
    mlp_size: Count = Field(description="Width of the SwiGLU layers; most of the weights that are added.")
    num_layers: Count = Field(description="Decoder layers; each adds the latency of a layer.")


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError(f"policy.chat_date: {text!r} should be a date such as 2024-07-26") from error


class PolicyConfig(Section):
    """The model to be trained: a Hugging Face directory, or a new one of a given shape."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Hugging Face directory to start from. Set this or policy.shape, not both.",
    )
    shape: ShapeConfig | None = Field(
        None, description="Architecture of a policy made on the spot; set this or policy.path."
    )
    growth: GrowthConfig | None = Field(
        None, description="Grow the policy to a size worth measuring; null trains it as it is."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of activations and of the weights while they are used; master weights are always"
        " float32. bfloat16 halves memory and is fast on TPU and GPU; float32 is the faster one on most"
        " CPUs.",
    )

    chat_date: Annotated[str, AfterValidator(_date)] = Field(
        "2024-07-26",
        description="Today, for chat templates that write the date into prompts (Llama 3.x). Fixed, so that a"
        " run does not change from day to day; set the day on which a run begins for one that is to know it.",
    )
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, by name, such as {enable_thinking: false} for Qwen3.",
    )

    @model_validator(mode="after")
    def _check(self) -> "PolicyConfig":
        if self.path is None and self.shape is None:
            raise ValueError(
                "policy: neither policy.path (a Hugging Face directory) nor policy.shape (a new"
                " model) is set; set one"
            )
        if self.path is not None and self.shape is not None:
            raise ValueError(
                "policy: both policy.path and policy.shape are set; keep one (policy.shape=null"
                " drops the shape)"
            )
        return self


class WarmStartConfig(Section):
    """Supervised training on the task's worked solutions before RL; leave the section out (null) for none."""

    steps: Count = Field(
        500,
        description="Updates. Too few and no sample is ever right, so RL has no signal; too many leave RL"
        " nothing to gain.",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="Peak learning rate. Lower it for a pretrained policy (1e-5)."
    )
    tokens_per_step: Count = Field(
        8192, description="Tokens in an update's batch. Raise when the loss is noisy and time allows."
    )
    cache_dir: str = Field(
        "cache/warm_start",
        min_length=1,
        description="Where the warmed-up policy is kept for the next run with the same settings; delete it"
        " to start over.",
    )
