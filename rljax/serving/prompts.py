"""Prompts as token ids; a prompt that is too long raises an error."""

from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import UserError
from rljax.serving.policy import ServedPolicy


class PromptError(UserError):
    """A prompt that this policy cannot take."""


def chat_ids(
    served: ServedPolicy,
    messages: Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the tokens of a chat, by the policy's template, up to the beginning of the answer.
    `template_args` are further variables of the template.
    """
    if not served.tokenizer.has_chat_template:
        raise PromptError(
            "the policy has no chat template: give a plain prompt (generate.py --raw, /v1/completions)"
        )
    text = served.tokenizer.apply_chat_template(messages, **(template_args or {}))
    return _checked(served, text, add_special_tokens=False)  # the template writes them


def text_ids(served: ServedPolicy, text: str) -> list[int]:
    """Returns the tokens of a text without a template, with those that the tokenizer adds, such as BOS."""
    return _checked(served, text, add_special_tokens=True)


def _checked(served: ServedPolicy, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON and command lines may contain
        raise PromptError(
            f"the prompt is not Unicode text: {text[error.start : error.end]!a} is not a character"
        ) from error
    return token_ids(served, served.tokenizer.encode(text, add_special_tokens))


def token_ids(served: ServedPolicy, ids: Sequence[int]) -> list[int]:
    """Checks token ids against the vocabulary and the longest prompt, and returns them."""
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
