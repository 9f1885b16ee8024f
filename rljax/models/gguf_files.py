"""GGUF files, the format of llama.cpp, as Hugging Face directories: `rljax import model.gguf DIR`.

A file holds architecture, tokenizer and weights, often quantized: these become numbers again, the ones that
llama.cpp multiplies by. The architectures of `huggingface.py` are read, with a BPE tokenizer over bytes or
of SentencePiece. A file with a feature that the forward pass lacks is an error.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rljax.errors import CheckpointError
from rljax.models.config import GemmaParts, ModelConfig, RopeScaling
from rljax.models.huggingface import save_model
from rljax.models.rope import inverse_frequencies
from rljax.models.transformer import Params

_GEMMA = "gemma3"
_ARCHITECTURES = ("llama", "qwen2", "qwen3", _GEMMA)
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10_000.0  # of every Gemma 3; files do not say them
_TENSORS = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm.weight": "attention_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "attention_post_norm",
    "post_ffw_norm.weight": "mlp_post_norm",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
_ROPE_FACTORS = "rope_freqs.weight"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # by tokenizer.ggml.pre; None is GPT-2's expression, which the library has built in
    "gpt-2": None,
    "smollm": None,
    "qwen2": _WORDS % "",
    "deepseek-r1-qwen": _WORDS % "",
    "llama-bpe": _WORDS % "{1,3}",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # in tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's
_NAMED_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class _File:
    """A GGUF file: its metadata by key, and its tensors by name."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(f"{path}: reading GGUF needs gguf (pip install 'rljax[gguf]')") from error
        self.path, self._dequantize = path, gguf.quants.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except Exception as error:  # whatever the library stumbles over
            raise CheckpointError(f"{path} is not a whole GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return default

    def require(self, key: str, default: Any, *supported: Any) -> Any:
        """Returns a value that is one of the supported ones."""
        value = self.get(key, default)
        if value not in supported:
            names = ", ".join(map(str, supported))
            raise CheckpointError(f"{self.path}: {key} is {value}; supported: {names}")
        return value

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as float32 with the shape of Hugging Face's."""
        tensor = self.tensors[name]
        try:
            return self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"{self.path}: {name} is stored as {kind}, which gguf cannot read"
            ) from error


def import_gguf(path: str | Path, directory: str | Path, dtype: str = "float32") -> None:
    """Writes the policy in a GGUF file as a Hugging Face directory.

    Args:
      directory: the destination; must not exist, or be empty.
      dtype: type of the weights in the directory: "float32", "bfloat16" or "float16".

    Raises:
      CheckpointError: the file cannot be read, its policy is not supported, or the destination is taken.
    """
    file = _File(Path(path))
    config = _model_config(file)
    with tempfile.TemporaryDirectory() as tokenizer:
        ends = _write_tokenizer(file, Path(tokenizer))
        save_model(directory, config, _params(file, config, dtype), dtype, tokenizer, ends)


def _model_config(file: _File) -> ModelConfig:
    architecture = file.require("general.architecture", None, *_ARCHITECTURES)

    def number(key: str, default: float | None = None) -> float:
        value = file.get(f"{architecture}.{key}", default)
        if isinstance(value, list):
            raise CheckpointError(f"{file.path}: {architecture}.{key} differs from layer to layer")
        return float(str(np.float32(value)))  # 1e-06, not 9.99999997e-07

    file.require("split.count", 1, 0, 1)
    file.require(f"{architecture}.rope.scaling.type", "none", "none")
    if architecture != _GEMMA:
        file.require(f"{architecture}.attention.sliding_window", 0, 0)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    hidden_size, heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", hidden_size // heads))
    file.require(f"{architecture}.rope.dimension_count", head_dim, head_dim)
    theta, layers = number("rope.freq_base", 10_000.0), int(number("block_count"))
    longest = int(number("context_length"))
    gemma = None
    if architecture == _GEMMA:
        local = tuple((layer + 1) % _GEMMA_PATTERN != 0 for layer in range(layers))
        gemma = GemmaParts(local, _GEMMA_LOCAL_THETA, int(number("attention.sliding_window")), longest)
    return ModelConfig(
        architecture=architecture if gemma is None else "gemma3_text",
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_size=int(number("feed_forward_length")),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_dim, theta) if _ROPE_FACTORS in file.tensors else None,
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", _GEMMA),
        max_positions=longest if gemma is None else min(longest, gemma.window),
        gemma=gemma,
    )


def _rope_scaling(file: _File, head_dim: int, theta: float) -> RopeScaling:
    """Returns the scaling whose factors a file holds: that of Llama 3.1 to 3.3, or an error."""
    factors = file.tensor(_ROPE_FACTORS)
    scaling = RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
    scaled = inverse_frequencies(head_dim, theta, scaling)
    if not np.allclose(scaled * factors, inverse_frequencies(head_dim, theta, None), rtol=1e-4):
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} is not the scaling of Llama 3")
    return scaling


def _params(file: _File, config: ModelConfig, dtype: str) -> Params:
    """Returns the weights; `save_model` checks that none is missing."""
    turned = {"q": config.num_heads, "k": config.num_kv_heads} if config.architecture == "llama" else {}
    params: Params = {"layers": [{} for _ in range(config.num_layers)]}
    for name in file.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        key = _TENSORS.get(name) if layer is None else _LAYER_TENSORS.get(layer[2])
        if name == _ROPE_FACTORS:
            continue
        if key is None or (layer is not None and int(layer[1]) >= config.num_layers):
            raise CheckpointError(f"{file.path}: {name} is no tensor of a {config.architecture} policy here")
        values = file.tensor(name)
        if config.gemma is not None and key.endswith("norm"):
            values = values - 1.0  # llama.cpp stores what the norm multiplies by
        if key in turned:
            values = _halved_rotation(values, turned[key])
        (params if layer is None else params["layers"][int(layer[1])])[key] = values.astype(dtype)
    return params


def _halved_rotation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes what llama.cpp does to the rows of queries and keys, whose rotary pairs it puts side by side."""
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _write_tokenizer(file: _File, directory: Path) -> list[int]:
    """Writes tokenizer.json and tokenizer_config.json, and returns the tokens that end a response."""
    is_sentencepiece = file.require("tokenizer.ggml.model", None, "gpt2", "llama") == "llama"
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    while kinds and kinds[-1] == _UNUSED:  # rows of the embedding that stand for no token
        kinds.pop()
    tokens = tokens[: len(kinds)]
    backend = _sentencepiece(file, tokens, kinds) if is_sentencepiece else _byte_level(file, tokens)
    for kind, special in ((_UNKNOWN, True), (_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=special) for t in added])
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", -1) for name in (*_NAMED_TOKENS, "eot")}
    named = {_NAMED_TOKENS[name]: tokens[i] for name, i in ids.items() if name in _NAMED_TOKENS and i >= 0}
    adds_bos = is_sentencepiece or file.get("tokenizer.ggml.pre") == "llama-bpe"
    if file.get("tokenizer.ggml.add_bos_token", adds_bos) and ids["bos"] >= 0:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
        )
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.get('general.architecture')}.context_length"),
        **named,
    }
    template = file.get("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [i for i in dict.fromkeys((ids["eos"], ids["eot"])) if i >= 0]


def _byte_level(file: _File, tokens: list[str]) -> tokenizers.Tokenizer:
    """Returns a BPE model over bytes, as GPT-2's."""
    split = file.require("tokenizer.ggml.pre", None, *_SPLITS)
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=split == "llama-bpe")
    )
    pattern = _SPLITS[split]
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    elif split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if "qwen" in split:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: _File, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Returns a BPE model of SentencePiece, which has no list of merges: of all pairs that are tokens when
    joined, it joins the one whose token has the highest score.
    """
    scores = file.get("tokenizer.ggml.scores")
    score = {token: scores[i] for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    pairs = [
        (token[:i], token[i:])
        for token in score
        for i in range(1, len(token))
        if token[:i] in score and token[i:] in score
    ]
    pairs.sort(key=lambda pair: (score["".join(pair)], score[pair[0]], score[pair[1]]), reverse=True)
    unknown = tokens[kinds.index(_UNKNOWN)] if _UNKNOWN in kinds else None
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            pairs,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space, begins = normalizers.Replace(" ", _SPACE), file.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if begins else space
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins else steps)
    return backend
