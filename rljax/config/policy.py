"""Keys of the policy: its architecture or checkpoint, its growth, and its training before RL."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rljax.config.lora import LoraConfig
from rljax.config.section import AutoOnOff, Count, PathText, Section


class ShapeConfig(Section):
    """Architecture of a policy made from scratch."""

    hidden_size: Count = Field(
        description="Width of the residual stream. Raise it for capacity; the cost grows with its square."
    )
    num_layers: Count = Field(
        description="Number of decoder layers. Raise it for longer chains of reasoning; decoding time grows"
        " in proportion."
    )
    num_heads: Count = Field(
        description="Number of query heads, a multiple of num_kv_heads. Raise it with hidden_size."
    )
    num_kv_heads: Count = Field(
        description="Number of key/value heads. Lower it for a smaller KV cache and faster long decodes."
    )
    head_dim: Count = Field(
        description="Size of a head, even; 64 or 128 is usual. num_heads * head_dim may differ from"
        " hidden_size."
    )
    mlp_size: Count = Field(
        description="Width of the SwiGLU layers, which hold most weights. Raise it for capacity; about 2.7"
        " times hidden_size is usual."
    )
    rope_theta: float = Field(
        10_000.0,
        gt=0,
        description="Base of the rotary frequencies. Raise it for contexts of many thousand tokens.",
    )
    tie_embeddings: bool = Field(
        True, description="Use the embedding as the LM head. Turn it off for large models."
    )
    qk_norm: bool = Field(
        True,
        description="Normalise queries and keys (Qwen3), for stability at high learning rates. Turn it off"
        " for Llama's architecture.",
    )
    attention_bias: bool = Field(
        False,
        description="Add a bias to the query, key and value projections. Set it for Qwen2's architecture; it"
        " excludes qk_norm.",
    )
    max_positions: Count = Field(
        4096,
        description="Most tokens of a sequence. Raise it when prompt and response together need more.",
    )

    @model_validator(mode="after")
    def _check(self) -> "ShapeConfig":
        if self.head_dim % 2:
            raise ValueError(
                f"policy.shape.head_dim: {self.head_dim} is odd; rotary embeddings turn pairs, so it"
                " must be even"
            )
        return self


class GrowthConfig(Section):
    """Enlarges the policy after its warm start without changing its outputs: new channels, neurons and layers
    write zeros. For benchmarks: the cost of a large policy with the behaviour of a small one.
    """

    hidden_size: Count = Field(
        description="Width of the residual stream after growth. Raise it for the cost of wider matrix"
        " products."
    )
    mlp_size: Count = Field(
        description="Width of the SwiGLU layers after growth. Raise it to add weights: most are here."
    )
    num_layers: Count = Field(
        description="Number of decoder layers after growth. Raise it for more latency per token."
    )


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError(f"policy.chat_date: {text!r} should be a date such as 2024-07-26") from error


class PolicyConfig(Section):
    """The model to train: from a Hugging Face directory, or a new one."""

    path: PathText | None = Field(
        None,
        min_length=1,
        description="Model to train: a Hugging Face directory, its name on the hub, org/name or"
        " org/name@revision, a GGUF file, or package:NAME for that of an installed package. Set this or"
        " policy.shape.",
    )
    shape: ShapeConfig | None = Field(
        None, description="Architecture of a policy made from scratch. Set either this or policy.path."
    )
    growth: GrowthConfig | None = Field(
        None, description="Size to which the policy is grown, for benchmarks; null keeps its size."
    )
    lora: LoraConfig | None = Field(
        None,
        description="Adapter to train instead of all weights; null trains all. Set it, {} for its defaults,"
        " where weights, gradients and moments do not fit.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of activations and of the weights in computation; master weights are float32,"
        " except for the base of policy.lora, which has this type. auto is bfloat16 on a GPU or TPU, where it"
        " is fast and halves memory; on a CPU float32, but for a policy.path of 50 million parameters or more"
        " the type that is measured to be faster and exact. A resumed run keeps the type that it began with."
        " Set float32 for fewer rounding errors, at several times the cost on an accelerator.",
    )
    outline_layers: AutoOnOff = Field(
        "auto",
        description="Whether compiled programs call the decoder layer, which is traced once either way, or"
        " have it inlined. On a CPU with training.remat the update of a called layer needs a fraction of the"
        " memory, and in bfloat16 layers that are not called are traced one by one: there auto is on, from 4"
        " layers on. Set on to save memory on a TPU, too; a GPU refuses it, since its compiler fuses nothing"
        " in a called layer.",
    )
    chat_date: Annotated[str, AfterValidator(_date)] = Field(
        "2024-07-26",
        description="Date for chat templates that write today's date into prompts (Llama 3.x). It is fixed,"
        " so that a run does not change from day to day; set the start of the run where the"
        " policy needs the date.",
    )
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, by name. Set them for options of a template, such as"
        " {enable_thinking: false} for Qwen3; one that the template does not read is an error.",
    )
    extra_eos_tokens: list[int | str] = Field(
        default_factory=list,
        description="Tokens that end a response beside the checkpoint's EOS, as ids or texts, such as"
        " [<|im_end|>]. Set the token with which the chat template ends a turn where the checkpoint does not"
        " name it (a run says so when it starts): responses would go on behind it. Exports keep them.",
    )


class WarmStartConfig(Section):
    """Supervised training on the task's worked solutions before RL; leave the section out (null) for none."""

    steps: Count = Field(
        500,
        description="Number of updates. Raise it when no sample is ever right, so that RL has no signal;"
        " lower it when RL has nothing left to gain.",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="Peak learning rate. Lower it for a pretrained policy (1e-5)."
    )
    tokens_per_step: Count = Field(
        8192, description="Tokens of an update's batch. Raise it when the loss is noisy and time allows."
    )
    cache_dir: PathText = Field(
        "cache/warm_start",
        min_length=1,
        description="Directory that keeps the warmed-up policy for the next run with the same settings."
        " Delete it to train again.",
    )
