"""Small heads in the published layouts, and their forward passes in plain NumPy."""

import json

import numpy as np
import safetensors.numpy

from rljax.models.config import ModelConfig

PREFIXES = {"sglang": "midlayer", "vllm": "layers.0"}
MASK, BLOCK = 7, 6  # of DFlash heads


def write_eagle3(directory, policy: ModelConfig, tokens=None, layout="sglang", layers=None):
    """Writes an EAGLE-3 head with random weights; returns its tensors under SGLang's names.

    Args:
      directory: made here.
      policy: the policy's architecture.
      tokens: the draft vocabulary, ascending token ids; None shares the policy's vocabulary and LM head.
      layout: "sglang" (also SpecForge's and the EAGLE authors') or "vllm".
      layers: layers behind which the three features are taken; None leaves the config silent.
    """
    rng, d = np.random.default_rng(0), policy.hidden_size
    tensors = {"fc.weight": _random(rng, d, 3 * d), "norm.weight": _scale(rng, d)}
    tensors |= _layer(rng, policy, 2 * d, "midlayer", hidden_norm=d) | _vocabulary(rng, policy, tokens)
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": policy.mlp_size,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "vocab_size": policy.vocab_size,
        "draft_vocab_size": None if tokens is None else len(tokens),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    if layers is not None and layout == "vllm":
        content["eagle_aux_hidden_state_layer_ids"] = list(layers)
    elif layers is not None:
        content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    _write(directory, content, {n.replace("midlayer", PREFIXES[layout]): t for n, t in tensors.items()})
    return tensors


def write_speculators_eagle3(directory, policy, tokens, **more):
    """`write_eagle3` in the format of vLLM's `speculators`; `more` of its config."""
    tensors = write_eagle3(directory, policy, tokens, layout="vllm")
    (directory / "config.json").write_text(json.dumps(_speculators_config("eagle3", policy, tokens) | more))
    return tensors


def write_dflash(directory, policy, layers, tokens):
    """Writes a DFlash head with random weights; returns its tensors. Arguments as of `write_eagle3`, `layers`
    any number of them.
    """
    rng, d, dim = np.random.default_rng(0), policy.hidden_size, policy.head_dim
    tensors = {"fc.weight": _random(rng, d, len(layers) * d)}
    tensors |= {"norm.weight": _scale(rng, d), "hidden_norm.weight": _scale(rng, d)}
    for number in range(2):
        norms = {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        tensors |= _layer(rng, policy, d, f"layers.{number}", **norms)
    tensors |= _vocabulary(rng, policy, tokens)
    own = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(layers)}
    _write(directory, _speculators_config("dflash", policy, tokens) | own, tensors)
    return tensors


def _random(rng, *shape):
    return (rng.standard_normal(shape) * shape[-1] ** -0.5 * 1.5).astype(np.float32)


def _scale(rng, size):
    return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)


def _layer(rng, policy, width, prefix, **norms):
    """A layer whose queries, keys and values read `width` numbers, with further `norms` of these sizes."""
    d, f = policy.hidden_size, policy.mlp_size
    queries, keys = policy.num_heads * policy.head_dim, policy.num_kv_heads * policy.head_dim
    layer = {
        "self_attn.q_proj": _random(rng, queries, width),
        "self_attn.k_proj": _random(rng, keys, width),
        "self_attn.v_proj": _random(rng, keys, width),
        "self_attn.o_proj": _random(rng, d, queries),
        "mlp.gate_proj": _random(rng, f, d),
        "mlp.up_proj": _random(rng, f, d),
        "mlp.down_proj": _random(rng, d, f),
    }
    norms |= {"input_layernorm": d, "post_attention_layernorm": d}
    layer |= {name: _scale(rng, size) for name, size in norms.items()}
    return {f"{prefix}.{name}.weight": array for name, array in layer.items()}


def _vocabulary(rng, policy, tokens):
    if tokens is None:
        return {}
    return {
        "lm_head.weight": 3 * _random(rng, len(tokens), policy.hidden_size),
        "d2t": np.asarray(tokens, np.int64) - np.arange(len(tokens)),
        "t2d": np.isin(np.arange(policy.vocab_size), tokens),
    }


def _speculators_config(kind, policy, tokens):
    """As speculators 0.5 writes it, without what is a default of transformers (RoPE's base of 10,000)."""
    layer = {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.mlp_size,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "vocab_size": policy.vocab_size,
        "rms_norm_eps": policy.norm_epsilon,
        "tie_word_embeddings": False,
    }
    if policy.rope_theta != 10_000:
        layer["rope_theta"] = policy.rope_theta
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": policy.vocab_size if tokens is None else len(tokens),
        "target_hidden_size": None,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/policy"}},
    }


def _write(directory, content, tensors):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def greedy_chain(tensors, policy, embed, features, tokens, depth, norm_before_residual=False) -> list[int]:
    """Returns the `depth` tokens that a greedy EAGLE-3 chain drafts, a full forward pass for each.

    Args:
      tensors: from `write_eagle3`, with a draft vocabulary.
      policy: the policy's architecture.
      embed: [V, d], the policy's embeddings.
      features: [n, 3, d], the low, middle and high features of the first n positions.
      tokens: int [n], the token behind each of them.
      depth: length of the chain.
      norm_before_residual: the layer adds to the normed hidden state.
    """
    layer = layer_of(tensors, "midlayer.")
    hidden = [tensors["fc.weight"] @ feature.reshape(-1) for feature in features]
    tokens, drafted = list(tokens), []
    for _ in range(depth):
        embedded, residual = embed[np.asarray(tokens)], np.stack(hidden)
        normed = norm(residual, layer["hidden_norm"], policy)
        x = np.concatenate([norm(embedded, layer["input_layernorm"], policy), normed], axis=-1)
        residual = normed if norm_before_residual else residual
        output = layer_outputs(residual, x, x, layer, policy, causal=True)[-1]
        logits = tensors["lm_head.weight"] @ norm(output, tensors["norm.weight"], policy)
        best = int(np.argmax(logits))
        drafted.append(best + int(tensors["d2t"][best]))
        hidden.append(output)
        tokens.append(drafted[-1])
    return drafted


def dflash_logits(tensors, policy, embed, features, last):
    """Logits [BLOCK - 1, V'] of one block, as `DFlashDraftModel` computes them.

    Args:
      features: [n, layers, d] of the tokens before `last`, which stands at position n.
    """
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    fused = features.reshape(len(features), -1) @ tensors["fc.weight"].T
    context = norm(fused, tensors["hidden_norm.weight"], policy)
    x = np.stack([embed[last], *[embed[MASK]] * (BLOCK - 1)])
    for number in range(2):
        layer = layer_of(tensors, f"layers.{number}.")
        h = norm(x, layer["input_layernorm"], policy)
        x = layer_outputs(x, h, np.concatenate([context, h]), layer, policy, causal=False)
    return norm(x, tensors["norm.weight"], policy)[1:] @ tensors["lm_head.weight"].T


def layer_of(tensors, prefix):
    """The weights of a layer by their last names: `q` to `down`, and norms."""
    names = {name: name.removesuffix(".weight").split(".")[-1] for name in tensors if prefix in name}
    layer = {short.removesuffix("_proj"): tensors[name] for name, short in names.items()}
    return layer | {"mlp_norm": layer["post_attention_layernorm"]}


def layer_outputs(residual, x, seen, layer, policy, causal):
    """Outputs [m, d] of a layer at the last m of n positions.

    Args:
      residual: [m, d], what attention adds to.
      x: [m, e], what queries are of.
      seen: [n, e], what keys and values are of.
      layer: from `layer_of`, or a head's own.
      causal: positions do not see later ones.
    """
    n, m, dim = len(seen), len(x), policy.head_dim
    q = (x @ layer["q"].T).reshape(m, -1, dim)
    k, v = ((seen @ layer[name].T).reshape(n, -1, dim) for name in "kv")
    if "q_norm" in layer:
        q, k = norm(q, layer["q_norm"], policy), norm(k, layer["k_norm"], policy)
    q, k = _rotated(q, np.arange(n - m, n), policy), _rotated(k, np.arange(n), policy)
    k, v = (np.repeat(y, q.shape[1] // k.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    if causal:
        scores = np.where(np.tril(np.ones((m, n), bool), n - m), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), v)
    residual = residual + attended.reshape(m, -1) @ layer["o"].T
    h = norm(residual, layer["mlp_norm"], policy)
    return residual + (silu(h @ layer["gate"].T) * (h @ layer["up"].T)) @ layer["down"].T


def norm(x, weight, policy):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + policy.norm_epsilon) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def _rotated(x, positions, policy):
    """Queries or keys [T, heads, D] at their positions [T]."""
    dim = policy.head_dim
    angles = positions[:, None, None] * policy.rope_theta ** (-np.arange(0, dim, 2) / dim)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
    )
