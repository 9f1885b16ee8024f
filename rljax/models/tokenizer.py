"""Tokenizers of Hugging Face model directories, on the `tokenizers` library alone.

Reads `tokenizer.json` (the tokens), `tokenizer_config.json` (special tokens and chat template;
`special_tokens_map.json` in older directories) and `chat_template.jinja`. Chat templates render as in
`transformers`: a sandboxed jinja2 environment with the same options, filters and functions. Two features are
left out on purpose: `clean_up_tokenization_spaces`, which rewrites decoded text (a reward should judge the
text of the policy), and truncation and padding stored in `tokenizer.json` (the caller decides about lengths).
Templates that read the date get a fixed one (`CHAT_DATE`).

Of a response there are two texts. `decode` is that of all tokens; stop texts and calls of tools are searched
in it. `response_text` leaves EOS and padding out; rewards, environments and agents read it.
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from rljax.errors import ConfigError, TokenizerError, known_names
from rljax.models.config import ModelConfig

Message = Mapping[str, Any]
"""One turn of a chat: {"role": "system" | "user" | "assistant" | ..., "content": text, ...}."""

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to text."""

CHAT_DATE = datetime.date(2024, 7, 26)
"""The date for chat templates that read it; the default of Llama 3's template. With the real date, the
prompts of a run would change from day to day."""

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SET_BY_CALLERS = {"messages", "add_generation_prompt"}
_OWN_VARIABLES = {"strftime_now", "tools", "documents"}  # which a user may set, but hardly wants to


class Tokenizer:
    """A tokenizer and its chat template; make one with `Tokenizer.load`.

    Attributes:
      directory: directory of its files, for errors.
      special_tokens: the named special tokens, e.g. {"eos_token": "<|im_end|>"}; chat templates see them.
      chat_date: date for chat templates.
      eos_token_ids: tokens that end a response of the policy; at first the tokenizer's EOS alone.
    """

    def __init__(
        self,
        directory: Path,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: tuple[Path, str] | None,
    ):
        self.directory = directory
        self.special_tokens = special_tokens
        self.chat_date = CHAT_DATE
        self._template_args: Mapping[str, Any] = {}
        self._backend = backend
        self._template_file, self._chat_template = chat_template or (directory, None)
        for name, token in special_tokens.items():
            if backend.token_to_id(token) is None:
                raise TokenizerError(
                    f"{directory}: {name} is {token!r}, which tokenizer.json does not contain; "
                    "add it there, or name a token that it has"
                )
        self.eos_token_ids: tuple[int, ...] = () if self.eos_token_id is None else (self.eos_token_id,)

    @staticmethod
    def files(directory: str | Path) -> list[Path]:
        """Returns those files of a directory that `load` reads."""
        paths = [Path(directory) / name for name in _FILES]
        return [path for path in paths if path.is_file()]

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Loads the tokenizer of a Hugging Face directory; raises `TokenizerError` if it cannot be read."""
        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{file} does not exist; a policy needs a `tokenizer.json` (with only vocab.json or "
                "tokenizer.model, load it once with transformers.AutoTokenizer and save_pretrained it)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} cannot be read by the tokenizers library: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        options = _read_json(directory / "tokenizer_config.json")
        named = {**_read_json(directory / "special_tokens_map.json"), **options}
        special_tokens = {}
        for name in _SPECIAL_TOKENS:
            value = named.get(name)
            if isinstance(value, dict):  # a serialised AddedToken
                value = value.get("content")
            if value is None:
                continue
            if not isinstance(value, str):
                raise TokenizerError(f"{directory}/tokenizer_config.json: {name} is {value!r}, not a string")
            special_tokens[name] = value
        return cls(directory, backend, special_tokens, _chat_template(directory, options))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns token ids of text. Special tokens in it are recognised.

        Args:
          add_special_tokens: whether to add those that the tokenizer puts around a text, such as BOS: for a
            prompt without a chat template, which writes its own.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns token ids of untrusted text: special tokens written in it are encoded as plain text."""
        return self._plain_backend.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids; ids beyond the vocabulary (padding of the embedding) are skipped."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def response_text(self, ids: Iterable[int]) -> str:
        """Returns the text of a response as rewards, environments and agents read it: that of all tokens but
        EOS and padding. Other special tokens, such as tags of reasoning, are part of it.
        """
        dropped = {*self.eos_token_ids, self._special_id("pad_token")}
        return self.decode([token for token in ids if token not in dropped])

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, or None if there is no such token."""
        return self._backend.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """EOS that the tokenizer names; a policy may have others (`eos_token_ids`)."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Padding token; EOS if the tokenizer names none (Llama 3)."""
        pad = self._special_id("pad_token")
        return self.eos_token_id if pad is None else pad

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of rows that an embedding needs for these tokens: the highest token id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """Returns the text of a chat by the template of the model.

        Args:
          messages: the turns, first to last.
          add_generation_prompt: end with the beginning of the assistant's answer.
          **template_args: further variables of the template; they override those of `set_template_args`.

        Raises:
          TokenizerError: there is no template, it refuses the messages, or it writes nothing.
        """
        variables = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            "strftime_now": self.chat_date.strftime,
            **self._template_args,
            **template_args,
        }
        template = self._compiled_template
        try:
            text = template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is code, and may raise anything
            what = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise TokenizerError(
                f"{self._template_file}: the chat template refuses these messages: {' '.join(what.split())}"
            ) from error
        if not text.strip():
            raise TokenizerError(
                f"{self._template_file}: the chat template writes nothing for these messages"
            )
        return text

    def set_template_args(self, args: Mapping[str, Any]) -> None:
        """Sets variables of the chat template, e.g. {"enable_thinking": False} for Qwen3.

        Raises:
          ConfigError: the template does not read one of them, so it would have no effect; or it is none that
            one may set.
        """
        read = set() if self._chat_template is None else self._template_variables
        for name in args:
            if name in _SET_BY_CALLERS:
                raise ConfigError(f"policy.chat_template_args.{name}: every prompt sets it; leave it out")
            if name not in read:
                known = read - _SET_BY_CALLERS - _OWN_VARIABLES - set(_SPECIAL_TOKENS)
                raise ConfigError(
                    f"policy.chat_template_args.{name}: the chat template of {self.directory} does not read"
                    f" it, so it has no effect; {known_names(name, known) if known else 'it has no options'}"
                )
        self._template_args = args

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_args: Any
    ) -> list[int]:
        """Returns token ids of `apply_chat_template`; all special tokens come from the template."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **template_args))

    def check_fits(self, config: ModelConfig) -> None:
        """Raises `TokenizerError` if the policy's embedding has too few rows for the tokens."""
        if self.vocab_size > config.vocab_size:
            last = self.vocab_size - 1
            raise TokenizerError(
                f"{self.directory}: token {self._backend.id_to_token(last)!r} has id {last}, but the "
                f"policy's vocab_size is {config.vocab_size}; use the tokenizer that belongs to the policy"
            )

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Returns whether every token has the same id in both tokenizers."""
        return self._backend.get_vocab() == other._backend.get_vocab()

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def _template_variables(self) -> set[str]:
        """Names that the chat template reads from outside."""
        self._compiled_template  # noqa: B018 (raises where the template is not valid)
        environment = _template_environment()
        names = jinja2.meta.find_undeclared_variables(environment.parse(self._chat_template))
        return names - environment.globals.keys()

    @functools.cached_property
    def _compiled_template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise TokenizerError(
                f"{self.directory} has no chat template, and chat messages need one: put it in "
                "`chat_template.jinja`, or in `tokenizer_config.json` as chat_template"
            )
        try:
            return _template_environment().from_string(self._chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"{self._template_file}: chat template, line {error.lineno}: not valid jinja: {error.message}"
            ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in an optional JSON file; {} if there is no file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} should hold a JSON object, not a {type(content).__name__}")
    return content


def _chat_template(directory: Path, options: dict[str, Any]) -> tuple[Path, str] | None:
    """Returns the template of chat_template.jinja, else that of tokenizer_config.json, as in transformers,
    with its file.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file, file.read_text(encoding="utf-8")
    template = options.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if "default" not in by_name:
            raise TokenizerError(
                f"{directory}/tokenizer_config.json: chat_template has {sorted(map(str, by_name))}, "
                "and none is named 'default'"
            )
        template = by_name["default"]
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{directory}/tokenizer_config.json: chat_template should be a string or a list of named ones"
        )
    return None if template is None else (directory / "tokenizer_config.json", template)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training masks; it renders as its content."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the sandboxed environment of chat templates, which are code from the checkpoint's author."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # The filter of jinja escapes HTML, which no model was trained on.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment
