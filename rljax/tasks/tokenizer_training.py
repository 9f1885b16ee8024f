"""Trains the tokenizer of a policy made from scratch, and saves it in Hugging Face's format.

Byte-level BPE, so any text can be encoded. Every digit is one token: the policy reads and writes numbers
digit by digit, and arithmetic needs no table of multi-digit tokens. The chat template is ChatML, in Qwen's
form.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rljax.errors import ConfigError

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_ROLES = ("system", "user", "assistant")
_ROLE_REPEATS = 1000

# A digit; a word with a space before it or a line break after it (so that "user\n" can be one token); a run
# of symbols; white space.
_PIECES = r"\p{N}| ?\p{L}+\n?| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: str | Path) -> Tokenizer:
    """Trains a byte-level BPE on texts and writes a tokenizer directory.

    The directory holds `tokenizer.json` and `tokenizer_config.json` (chat template, end-of-sequence token
    `<|im_end|>`, padding token `<|endoftext|>`), which `transformers.AutoTokenizer` loads. The role headers
    of the chat template are merged into one token each where `vocab_size` allows it, so that the template
    costs six tokens around a prompt.

    Args:
      texts: texts that the policy will read and write, without the chat template.
      vocab_size: at most this many tokens; the texts may need fewer. At least 259, the 256 bytes and the
        special tokens.
      directory: directory to write; created if it is missing.

    Returns:
      The tokenizer, as `tokenizers.Tokenizer.from_file` would load it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size: must be at least {smallest} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer=trainer)

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    # Written last, by an atomic rename: where this file exists the tokenizer is complete, also after a kill.
    partial = directory / ".tokenizer.json.tmp"
    partial.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    os.replace(partial, directory / "tokenizer.json")
    return tokenizer


def _with_roles(texts: Iterable[str]) -> Iterable[str]:
    """Adds the role headers to the texts, so often that they are merged before rarer sequences."""
    for _ in range(_ROLE_REPEATS):
        yield from (role + "\n" for role in _ROLES)
    yield from texts
