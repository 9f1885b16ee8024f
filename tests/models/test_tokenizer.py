"""Tokenizers: the same ids and the same chats as transformers, and errors in the user's words."""

import dataclasses
import datetime
import json

import pytest

from rljax.errors import ConfigError, TokenizerError
from rljax.models.config import ModelConfig
from rljax.models.tokenizer import Tokenizer
from tests.models.checkpoints import write_tokenizer

TEXTS = [
    "The sum of 12 and 30 is 42.",
    "  two spaces, a tab\t, and \n\n newlines \n",
    "Größe 東京 🙂 — e\u0301 don't we're",
    "<|im_start|>user\nhi<|im_end|> and <|eot_id|> inside text",
    "",
]
CHATS = [
    [{"role": "user", "content": "What is 1+1?"}],
    [
        {"role": "system", "content": 'Be <brief> & "exact".\n'},
        {"role": "user", "content": "  1+1?\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "東京 🙂"},
    ],
]


@pytest.fixture(params=[("qwen", True), ("llama3", False)], ids=str)
def pair(request, tmp_path):
    """Ours and transformers' tokenizer of the same directory, its template in the config or in a file."""
    transformers = pytest.importorskip("transformers")
    style, template_file = request.param
    write_tokenizer(tmp_path, style, template_file=template_file)
    return Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)


def edit_config(directory, **changes):
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_ids_and_texts_are_those_of_transformers(pair):
    ours, reference = pair
    for text in TEXTS:
        for add in (False, True):
            assert ours.encode(text, add_special_tokens=add) == reference.encode(text, add_special_tokens=add)
        ids = ours.encode(text, add_special_tokens=True)
        for skip in ({"skip_special_tokens": False}, {"skip_special_tokens": True}):
            assert ours.decode(ids, **skip) == reference.decode(ids, **skip)
    assert ours.eos_token_id == reference.eos_token_id is not None
    assert ours.bos_token_id == reference.bos_token_id
    pad = reference.eos_token_id if reference.pad_token_id is None else reference.pad_token_id
    assert ours.pad_token_id == pad and ours.vocab_size == len(reference)


@pytest.mark.parametrize("chat", CHATS, ids=["one-turn", "several-turns"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chats_are_those_of_transformers(pair, chat, add_generation_prompt):
    ours, reference = pair
    ours.chat_date = datetime.date.today()
    options = {"add_generation_prompt": add_generation_prompt}
    expected = reference.apply_chat_template(chat, tokenize=False, **options)
    assert ours.apply_chat_template(chat, **options) == expected
    expected_ids = reference.apply_chat_template(chat, tokenize=True, **options)["input_ids"]
    assert ours.encode_chat(chat, **options) == expected_ids


def test_template_arguments_and_json_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, "qwen")
    ours, reference = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = [CHATS[0][0], {"role": "tool", "content": {"text": "<b>東京</b> & 'x'", "n": [1, 2.5, None]}}]
    options = {"add_generation_prompt": True, "enable_thinking": False}
    ours_text = ours.apply_chat_template(chat, **options)
    assert ours_text == reference.apply_chat_template(chat, tokenize=False, **options)
    assert "<b>東京</b> & 'x'" in ours_text  # not escaped as HTML
    assert ours_text.endswith("</think>\n\n")


def test_template_features_beyond_plain_jinja(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n  {% if loop.index > 2 %}\n    {% break %}\n  {% endif %}\n"
        "{% generation %}[{{ m.content }}]{% endgeneration %}\n{% endfor %}\n"
        "{{ strftime_now('%%') }}{{ bos_token }}"
    )
    messages = [{"role": "user", "content": text} for text in "abc"]
    assert Tokenizer.load(tmp_path).apply_chat_template(messages) == "[a][b]%"


def test_the_date_and_the_variables_of_a_template_are_the_tokenizers(tmp_path):
    write_tokenizer(tmp_path, "llama3")
    tokenizer = Tokenizer.load(tmp_path)
    assert "26 Jul 2024" in tokenizer.apply_chat_template(CHATS[0])  # whatever the day
    tokenizer.chat_date = datetime.date(2031, 5, 7)
    assert "07 May 2031" in tokenizer.apply_chat_template(CHATS[0])
    tokenizer.set_template_args({"date_string": "some day"})
    assert "some day" in tokenizer.apply_chat_template(CHATS[0])
    assert "never" in tokenizer.apply_chat_template(CHATS[0], date_string="never")


@pytest.mark.parametrize(
    ("args", "template", "message"),
    [
        ({"enable_thinkng": 1}, True, "enable_thinkng: the chat template of .*; did you mean 'enable_thi"),
        ({"reasoning": "high"}, True, "reasoning: .* does not read it, so it has no effect"),
        ({"content": "x", "messages": []}, True, "messages: every prompt sets it"),
        ({"enable_thinking": False}, False, "enable_thinking: .*it has no options"),
    ],
)
def test_variables_that_a_template_does_not_read_are_refused(args, template, message, tmp_path):
    write_tokenizer(tmp_path)
    if not template:
        edit_config(tmp_path, chat_template=None)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.set_template_args({"enable_thinking": False} if template else {})
    with pytest.raises(ConfigError, match=rf"^policy\.chat_template_args\.{message}") as error:
        tokenizer.set_template_args(args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ raise_exception('not\nso') }}", "refuses these messages: not so$"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),  # a sandbox
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for m in massages %}{{ m.content }}{% endfor %}\n", "writes nothing"),
    ],
)
def test_a_template_that_fails_or_writes_nothing_is_named_in_one_line(template, message, tmp_path):
    write_tokenizer(tmp_path)
    edit_config(tmp_path, chat_template=template)
    for file in ("tokenizer_config.json", "chat_template.jinja"):  # the file comes first
        if file == "chat_template.jinja":
            (tmp_path / file).write_text(template)
        with pytest.raises(TokenizerError, match=f"{file}: the chat template .*{message}") as error:
            Tokenizer.load(tmp_path).encode_chat(CHATS[0])
        assert "\n" not in str(error.value)


def test_the_text_of_a_response_lacks_eos_and_padding_alone(tmp_path):
    write_tokenizer(tmp_path, more_special=["<think>", "</think>"])
    tokenizer = Tokenizer.load(tmp_path)
    said = tokenizer.encode("<think>1+1</think>2")
    eos, pad, start = map(tokenizer.token_id, ("<|im_end|>", "<|endoftext|>", "<|im_start|>"))
    assert tokenizer.response_text([*said, eos, pad, pad]) == "<think>1+1</think>2"
    assert tokenizer.decode([*said, eos], skip_special_tokens=True) == "1+12"
    assert tokenizer.response_text([start, *said]) == "<|im_start|><think>1+1</think>2"
    tokenizer.eos_token_ids = (start,)
    assert tokenizer.response_text([*said, eos, start]) == "<think>1+1</think>2<|im_end|>"
    edit_config(tmp_path, pad_token=None)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.eos_token_ids = (start,)
    assert tokenizer.response_text([*said, eos, pad]) == "<think>1+1</think>2<|im_end|><|endoftext|>"


def test_special_tokens_as_objects_and_in_the_older_file(tmp_path):
    write_tokenizer(tmp_path)
    edit_config(tmp_path, eos_token={"content": "<|endoftext|>", "lstrip": False}, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.token_id("<|endoftext|>")  # the config wins
    assert tokenizer.bos_token_id == tokenizer.token_id("<|im_start|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_named_templates_use_the_default_one(tmp_path):
    write_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit_config(tmp_path, chat_template=templates)
    assert Tokenizer.load(tmp_path).apply_chat_template(CHATS[0]) == "yes"
    edit_config(tmp_path, chat_template=templates[:1])
    with pytest.raises(TokenizerError, match="none is named 'default'"):
        Tokenizer.load(tmp_path)


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    write_tokenizer(tmp_path)
    plain = Tokenizer.load(tmp_path).encode(TEXTS[0])
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == plain
    assert len(plain) > 3


def test_errors_name_the_file(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    edit_config(tmp_path, chat_template=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.encode_chat(CHATS[0])
    edit_config(tmp_path, chat_template="{% if %}")
    with pytest.raises(TokenizerError, match="line 1: not valid jinja"):
        Tokenizer.load(tmp_path).apply_chat_template(CHATS[0])
    edit_config(tmp_path, eos_token="<|nowhere|>")
    with pytest.raises(TokenizerError, match=r"eos_token is '<\|nowhere\|>', which tokenizer\.json does not"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not readable JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_check_fits_wants_a_row_for_every_token(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    config = ModelConfig("qwen3", tokenizer.vocab_size, 8, 1, 1, 1, 8, 8)
    tokenizer.check_fits(config)
    with pytest.raises(TokenizerError, match=f"has id {tokenizer.vocab_size - 1}"):
        tokenizer.check_fits(dataclasses.replace(config, vocab_size=tokenizer.vocab_size - 1))
