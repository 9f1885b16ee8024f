"""Prompts as token ids; a prompt that does not fit is an error."""

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
    return text_ids(served, served.tokenizer.apply_chat_template(messages))  # it writes all special tokens


def text_ids(served: ServedPolicy, text: str) -> list[int]:
    """A text as it stands."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON and command lines may hold
        raise PromptError(
            f"the prompt is not Unicode text: {text[error.start : error.end]!a} is no character"
        ) from error
    return token_ids(served, served.tokenizer.encode(text))


def token_ids(served: ServedPolicy, ids: Sequence[int]) -> list[int]:
    """Token ids that are given as such."""
    if not ids:
        raise PromptError("the prompt has no tokens")
    if not all(0 <= token < served.vocab_size for token in ids):
        raise PromptError(f"the prompt has token ids outside the vocabulary, 0 to {served.vocab_size - 1}")
    if len(ids) > served.max_prompt_tokens:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, more than the {served.max_prompt_tokens} that fit"
            " (--max-prompt-tokens)"
        )
    return list(ids)
