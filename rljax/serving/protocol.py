"""Bodies of `/v1/chat/completions` and `/v1/completions` as OpenAI's clients send them.

Unsupported fields are refused with a reason, not ignored: a researcher who sets `logit_bias` should not
get samples without it.
"""

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

_MOST_CHOICES = 128
_MOST_STOPS = 16
MOST_ALTERNATIVES = 20
"""Most alternatives to a token that a request may want."""
_SET_HERE = ("messages", "add_generation_prompt")  # variables of the template that are no matter of arguments


class RequestError(Exception):
    """A refused request.

    Attributes:
      status: status of the HTTP response.
      message: the error, and its remedy.
      param: the invalid field, if there is one.
      code: OpenAI's name of the error, for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _sayable(message), None if param is None else _sayable(param)

    def body(self) -> dict[str, Any]:
        """Returns the JSON that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def _sayable(text: str) -> str:
    """Returns text that UTF-8 can encode: JSON may contain half a surrogate pair, which it cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _requested(cls, content: Any) -> Any:
        """Drops null values. Of unknown keys only the first is kept, to be named in the error: an error for
        each of a million would take gigabytes.
        """
        if not isinstance(content, dict):
            return content
        requested = {key: value for key, value in content.items() if value is not None}
        unknown = next((key for key in requested if key not in cls.model_fields), None)
        if unknown is None:
            return requested
        known = {key: requested[key] for key in cls.model_fields if key in requested}
        return known | {_sayable(unknown): requested[unknown]}


_Item = TypeVar("_Item")
_List = Annotated[list[_Item], Field(fail_fast=True)]  # stops at the first error, as above


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False


_Text = Annotated[str, Field(min_length=1)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
_Tokens = Annotated[int, Field(ge=1)]
_Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]


class Body(_Strict):
    """Fields of both kinds of requests.

    Attributes:
      top_k, min_p: filters, see `SamplingParams`; not part of OpenAI's protocol.
      return_token_ids: return the token ids of the response in every choice, as `token_ids`; not part of
        OpenAI's protocol.
      user: accepted and ignored.
    """

    model: str
    max_tokens: _Tokens | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    seed: _Seed | None = None
    stop: _Text | Annotated[_List[_Text], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict | None = None
    user: str | None = None
    return_token_ids: bool = False

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sampling_settings(self) -> dict[str, float]:
        """Temperature and filters that the request names, by the names of `SamplingParams`."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """Number of the likeliest tokens that the request wants to see for every token."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with the prompt."""
        return False

    @property
    def wants_scores(self) -> bool:
        """Whether the request wants log-probabilities that decoding does not keep."""
        return self.wants_logprobs and (self.alternatives > 0 or self.echoes)

    @property
    def tokens_field(self) -> str:
        """Name of the field that limits the length of a response."""
        return "max_tokens"

    @property
    def most_tokens(self) -> int | None:
        """Largest number of tokens of a response; None if the request does not limit it."""
        return getattr(self, self.tokens_field)

    def refuse_the_impossible(self) -> None:
        """Raises a RequestError for a field that the engine does not support."""
        if self.logit_bias:
            raise _unsupported("logit_bias", "logits are not changed; leave it out")
        if self.stream_options is not None and not self.stream:
            raise _unsupported("stream_options", "only a stream has any; set stream")


def _only_text(kind: str) -> str:
    if kind != "text":
        raise ValueError(f"a part of type {_sayable(kind)[:40]!r}, and this policy reads text only")
    return kind


class TextPart(_Strict):
    """A part of a message."""

    type: Annotated[str, AfterValidator(_only_text)]
    text: str


class CalledFunction(_Strict):
    """The function of a call; its arguments are JSON as the policy wrote it."""

    name: str
    arguments: str = ""


class ToolCall(_Strict):
    """A call of a tool in an assistant's turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form of chat templates: with arguments as an object, if they are one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        call = {"type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


class Message(_Strict):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[_List[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a turn of role {self.role} has tool_calls, which only an assistant makes")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only an assistant's turn with tool_calls may have none")
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form of chat templates; a content of null is empty text."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        message = {"role": self.role, "content": content}
        message |= {name: value for name, value in others.items() if value is not None}
        calls = [call.for_template() for call in self.tool_calls or ()]
        return message | ({"tool_calls": calls} if calls else {})


class ResponseFormat(_Strict):
    """The format of a response; only text is supported."""

    type: Literal["text"]


class ChatBody(Body):
    """`/v1/chat/completions`.

    Attributes:
      chat_template_kwargs: further variables of the policy's chat template, such as enable_thinking; not part
        of OpenAI's protocol.
    """

    messages: Annotated[_List[Message], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0

    def refuse_the_impossible(self) -> None:
        super().refuse_the_impossible()
        if self.top_logprobs and not self.logprobs:
            raise _unsupported("top_logprobs", "it is part of logprobs; set logprobs to true")
        for name in _SET_HERE:
            if name in (self.chat_template_kwargs or {}):
                raise _unsupported("chat_template_kwargs", f"{name} is set by the server; leave it out")


class CompletionBody(Body):
    """`/v1/completions`."""

    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: _Alternatives | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; each is a text or a list of token ids."""
        several = isinstance(self.prompt, list) and not all(isinstance(item, int) for item in self.prompt)
        return self.prompt if several else [self.prompt]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def refuse_the_impossible(self) -> None:
        super().refuse_the_impossible()
        if self.max_tokens == 0 and not self.echo:
            raise _unsupported("max_tokens", "0 samples nothing; set echo, or at least 1")
        if self.best_of not in (None, self.choices):
            raise _unsupported("best_of", "nothing is ranked; leave it out")
        if self.suffix is not None:
            raise _unsupported("suffix", "text is only continued; leave it out")
        if self.prompt == []:
            raise _unsupported("prompt", "the list is empty; give at least one")


def parse(kind: type[Body], content: Any) -> Body:
    """Parses the body of a request; raises a RequestError that names the first invalid field."""
    if not isinstance(content, dict):
        raise RequestError(400, f"the body should be a JSON object, not {type(content).__name__}")
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = errors[0]
        branches = ("str", "constrained-str")  # of unions; branches that are lists end in a bracket
        if first["loc"][-1] in branches:  # the branch that got furthest says more than that it is no text
            union = first["loc"][:-1]
            of_union = [each for each in errors if each["loc"][: len(union)] == union]
            first = max(of_union, key=lambda each: len(each["loc"]))
        parts = [str(part) for part in first["loc"] if part not in branches]
        field = ".".join(part for part in parts if not part.endswith("]"))
        reason = first["msg"].removeprefix("Value error, ")
        reason = "this server does not know it" if first["type"] == "extra_forbidden" else reason
        raise RequestError(400, f"{field}: {reason}", str(first["loc"][0])) from error
    body.refuse_the_impossible()
    return body


def _unsupported(param: str, reason: str) -> RequestError:
    return RequestError(400, f"{param}: {reason}", param, "unsupported_value")
