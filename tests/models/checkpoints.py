"""Small random checkpoints for tests: written by `transformers`, with a tokenizer trained on the spot.

`make_checkpoint` needs torch and skips the calling test where there is none; `write_tokenizer` needs only
`tokenizers`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

QWEN_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {%- if message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' }}
        {{- message.content | tojson }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_SPECIAL_TOKENS = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
}
_NAMED = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
}
_TEMPLATES = {"qwen": QWEN_TEMPLATE, "llama3": LLAMA3_TEMPLATE}
_CORPUS = [
    "Speculative decoding drafts tokens and verifies them all at once; a policy learns from rewards.",
    "The sum of 12 and 30 is 42, and 42 times 2 is 84. \n\n  def add(a, b):\n    return a + b\n",
    "Größe, naïve café, 東京, Ελληνικά, 🙂 don't we're I'll",
] * 4
VOCAB_SIZE = 320
"""Embedding rows of `make_checkpoint`'s models: some more than the tokenizer has tokens, as is usual."""


def write_tokenizer(
    directory: str | Path, style: str = "qwen", template_file: bool = False, more_special: Sequence[str] = ()
) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a byte-level BPE with about 300 tokens.

    Args:
      directory: created if need be.
      style: "qwen" (no BOS; ends turns with <|im_end|>) or "llama3" (a BOS, no padding token).
      template_file: the chat template goes to chat_template.jinja instead of tokenizer_config.json.
      more_special: further special tokens.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    special = [*_SPECIAL_TOKENS[style], *more_special]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    if style == "llama3":
        bos = _NAMED[style]["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_NAMED[style],
    }
    if template_file:
        (directory / "chat_template.jinja").write_text(_TEMPLATES[style], encoding="utf-8")
    else:
        config["chat_template"] = _TEMPLATES[style]
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_theta": 10_000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
_KINDS["gemma3"] = {
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
KINDS = tuple(_KINDS)


def make_checkpoint(
    directory: str | Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | int | None = None,
    **overrides: Any,
) -> Any:
    """Writes a random model with tokenizer as `transformers` does, and returns the torch model.

    Args:
      directory: created if need be.
      kind: "qwen2" (tied, biases), "qwen2-untied" (no GQA), "qwen3" (head_dim twice hidden / heads, GQA,
        tied), "llama3" (GQA, RoPE scaling beyond 32 positions, untied) or "gemma3" (a local layer with a
        window of 128, tied). Two layers, hidden size 64.
      seed: of the weights.
      dtype: of the weights, as torch names it.
      max_shard_size: shards the weights, e.g. "200KB".
      **overrides: keys of the Hugging Face config, e.g. num_hidden_layers=4.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = Path(directory)
    style = "llama3" if kind == "llama3" else "qwen"
    write_tokenizer(directory, style)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos = ["<|eot_id|>", "<|end_of_text|>"] if style == "llama3" else ["<|im_end|>", "<|endoftext|>"]
    bos = backend.token_to_id("<|begin_of_text|>")
    tokens = {"eos_token_id": [backend.token_to_id(t) for t in eos], "bos_token_id": bos}
    config = transformers.AutoConfig.for_model(**{**_SHAPE, **_KINDS[kind], **tokens, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Norms and biases too: transformers starts them at 1 and 0, which would hide a missing one.
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(0.5 * noise if weight.ndim == 1 else noise * weight.shape[1] ** -0.5)
    model = model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        **tokens, do_sample=True, temperature=0.6, top_p=0.95, top_k=20
    )
    model.save_pretrained(directory, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return model
