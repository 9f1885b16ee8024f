"""What a policy is asked, as token ids; what does not fit is an error that says so."""

from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import UserError
from rljax.serving.policy import ServedPolicy


class PromptError(UserError):
    """A prompt that this policy cannot be asked."""


def chat_ids(served: ServedPolicy, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A chat, by the policy's own template, up to where its answer begins."""
    if not served.tokenizer.has_chat_template:
        raise PromptError(
            "the policy has no chat template: give a plain prompt (generate.py --raw, /v1/completions)"
        )
    return token_ids(served, served.tokenizer.encode_chat(messages))


def text_ids(served: ServedPolicy, text: str) -> list[int]:
    """A text as it stands."""
    return token_ids(served, served.tokenizer.encode(text))


def token_ids(served: ServedPolicy, ids: Sequence[int]) -> list[int]:
    """Token ids that are given as such."""
    vocab_size = served.saved.policy.config.vocab_size
    if not ids:
        raise PromptError("the prompt has no tokens")
    if not all(0 <= token < vocab_size for token in ids):
        raise PromptError(f"the prompt has token ids outside the vocabulary, 0 to {vocab_size - 1}")
    if len(ids) > served.max_prompt_tokens:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, more than the {served.max_prompt_tokens} that fit"
            " (--max-prompt-tokens)"
        )
    return list(ids)
