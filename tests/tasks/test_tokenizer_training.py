"""The trained tokenizer: what its ids mean, and that `transformers` reads the directory alike."""

import pytest
from tokenizers import Tokenizer

from rljax.errors import ConfigError
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.tokenizer_training import train_tokenizer

SAMPLES = [
    "47a5b8=",
    "a5+47=52b8+52=60#60",
    "<|im_start|>user\n12a3=<|im_end|>\n<|im_start|>assistant\na3+12=15#15<|im_end|>",
    "Twelve  apples,\n\tdon't!  99 — émigré 🙂 <|endoftext|>",
    "",
]


def task_texts() -> list[str]:
    task = ChainArithmetic(seed=0)
    problems = [task.problem("warm_start", i) for i in range(500)]
    return [text for problem in problems for text in (problem.messages[0]["content"], problem.solution)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "made" / "tokenizer"
    train_tokenizer(task_texts(), 512, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_texts_come_back_and_every_character_of_the_task_is_a_token_of_its_own(tokenizer):
    for text in SAMPLES:
        assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text
    assert tokenizer.decode(encode(tokenizer, "<|im_start|>53#53<|im_end|><|endoftext|>")) == "53#53"
    for text in task_texts():
        assert len(encode(tokenizer, text)) == len(text)


def test_roles_are_tokens_and_digits_stay_apart(tokenizer, tmp_path):
    """So the chat template costs six tokens, whatever fills the vocabulary or is repeated in the texts."""
    tokens = tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n").tokens
    assert tokens == ["<|im_start|>", "userĊ", "<|im_end|>", "Ċ", "<|im_start|>", "assistantĊ"]
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    full = train_tokenizer(words, 320, tmp_path)
    assert full.get_vocab_size() == 320 and full.encode("user\n").tokens == ["userĊ"]
    repeated = train_tokenizer(["the year 1984 "] * 500, 400, tmp_path)
    assert repeated.encode("1984").tokens == ["1", "9", "8", "4"]
    assert len(repeated.encode("the year").tokens) == 2  # other pieces are merged
    with pytest.raises(ConfigError, match="vocab_size: must be at least 259"):
        train_tokenizer(["1"], 258, tmp_path)


def test_the_vocabulary_is_small_and_training_repeats_exactly(tokenizer, directory, tmp_path):
    assert tokenizer.get_vocab_size() <= 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))
    train_tokenizer(task_texts(), 512, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()


def test_transformers_loads_it_and_agrees(directory, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(theirs) == tokenizer.get_vocab_size() and theirs.eos_token_id != theirs.pad_token_id
    for text in [*SAMPLES, *task_texts()[:100]]:
        ids = encode(tokenizer, text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "Work it out."}, {"role": "user", "content": "12+3="}]
    head = "<|im_start|>system\nWork it out.<|im_end|>\n<|im_start|>user\n12+3=<|im_end|>\n"
    assert theirs.apply_chat_template(messages, tokenize=False) == head
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == head + "<|im_start|>assistant\n"
