"""Request bodies: what is taken, and one reason for each that is not."""

import tracemalloc

import pytest

from rljax.serving.protocol import ChatBody, CompletionBody, RequestError, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant"}
BAD_CHATS = {  # values of a field
    "messages": [
        *([turn] for turn in ({"role": "robot", "content": "x"}, {"role": "user"}, USER | {"\ud800": 1})),
        *([turn] for turn in (USER | {"tool_calls": [CALL]}, ASSISTANT | {"tool_calls": []})),
        [ASSISTANT | {"content": None}],
    ],
    "model": [None],
    "max_tokens": [0],
    "n": [0, 1000],
    "seed": ["one", 2**64],
    "stop": [[""], ["x"] * 17],
    "stream_options": [{"include_usage": True}],  # without a stream
    "temperature": [-0.1],
    "top_p": [0, 1.1],
    "top_k": [-1],
    "min_p": [-0.1],
    "top_logprobs": [5],  # without logprobs
    "chat_template_kwargs": [{"messages": []}],
    "presence_penalty": ["some"],
    "logit_bias": [{"1": 5}],
    "response_format": [{"type": "json_object"}],
    "tools": [[]],
    "\ud800": [1],
}
BAD_COMPLETIONS = {
    "prompt": [[], {"text": "x"}, ["x", 1], ["x", []]],
    "logprobs": [21],
    "best_of": [4],
    "suffix": ["x"],
    "messages": [[]],
}


@pytest.mark.parametrize("base, table_of", [(CHAT, BAD_CHATS), (TEXT, BAD_COMPLETIONS)])
def test_bad_bodies_are_refused_by_the_name_of_the_field(base, table_of):
    kind = ChatBody if base is CHAT else CompletionBody
    parse(kind, base)
    with pytest.raises(RequestError, match="JSON object"):
        parse(kind, [base])
    for field, values in table_of.items():
        for value in values:
            with pytest.raises(RequestError) as refused:
                parse(kind, base | {field: value})
            error, param = refused.value, field.replace("\ud800", "\\ud800")
            assert (error.status, error.param) == (400, param) and error.message.startswith(param)
            assert len(error.message) > len(param) + 5 and "\n" not in error.message
            assert error.body()["error"]["type"] == "invalid_request_error"


def test_what_clients_send_is_taken():
    numbers = {"temperature": 1, "n": None, "max_tokens": 5, "max_completion_tokens": 7, "seed": -1}
    nothing = {"stop": None, "frequency_penalty": 0, "logit_bias": {}, "top_logprobs": 0, "user": "u"}
    others = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    body = parse(ChatBody, CHAT | numbers | nothing | others | {"response_format": {"type": "text"}})
    assert (body.choices, body.stops, body.most_tokens) == (1, [], 7)
    assert body.wants_usage and body.wants_logprobs
    assert not parse(ChatBody, CHAT).wants_logprobs and not parse(CompletionBody, TEXT).wants_logprobs
    assert parse(CompletionBody, TEXT | {"logprobs": 0}).wants_logprobs
    # Null asks for nothing: clients hand back a whole message of an answer.
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    body = parse(ChatBody, CHAT | {"tools": None, "messages": [*CHAT["messages"], answer]})
    assert body.messages[1].for_template() == {"role": "assistant", "content": "x"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse(ChatBody, CHAT | {"messages": [{"role": "user", "content": parts, "name": "x"}]})
    assert body.messages[0].for_template() == {"role": "user", "content": "ab", "name": "x"}
    for prompt, prompts in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"],) * 2, ([[1], [2, 3]],) * 2):
        assert parse(CompletionBody, TEXT | {"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    "arguments, shown", [('{"a": 1}', {"a": 1}), ("", {}), ("{broken", "{broken"), ("[1]", "[1]")]
)
def test_a_turn_of_calls_needs_no_content(arguments, shown):
    """Templates get arguments as an object; what the policy wrote is kept where it is none."""
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "2", "tool_call_id": "c1"}]
    body = parse(ChatBody, CHAT | {"messages": [*CHAT["messages"], *turns]})
    written = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": shown}}
    assert body.messages[1].for_template() == {"role": "assistant", "content": "", "tool_calls": [written]}
    assert body.messages[2].for_template() == turns[1]


def test_an_image_is_refused_in_one_clear_line():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "what is this?"}, image]
    with pytest.raises(RequestError) as refused:
        parse(ChatBody, CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert refused.value.message == (
        "messages.0.content.1.type: a part of type 'image_url', and this policy reads text only"
    )


MANY = 20_000


@pytest.mark.parametrize(
    "kind, change",
    [
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[{}] * MANY]}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"} | {f"key{i}": 1 for i in range(MANY)}]}),
        (ChatBody, {f"key{i}": 1 for i in range(MANY)}),
        (ChatBody, {"logit_bias": {f"key{i}": "x" for i in range(MANY)}}),
        (ChatBody, {"stop": [1] * MANY}),
    ],
)
def test_a_body_that_is_wrong_in_many_places_costs_no_more_than_in_one(kind, change):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parse(kind, (CHAT if kind is ChatBody else TEXT) | change)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
