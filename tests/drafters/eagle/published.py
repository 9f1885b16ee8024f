"""Small EAGLE-3 checkpoints in the published layouts, and their forward pass in plain NumPy."""

import json

import numpy as np
import safetensors.numpy

from rljax.models.config import ModelConfig

PREFIXES = {"sglang": "midlayer", "vllm": "layers.0"}


def write_eagle3(directory, policy: ModelConfig, tokens=None, layout="sglang", layers=None, seed=0):
    """Writes a head with random weights; returns its tensors under SGLang's names.

    Args:
      directory: made here.
      policy: the policy's architecture.
      tokens: the draft vocabulary, ascending token ids; None shares the policy's vocabulary and LM head.
      layout: "sglang" (also SpecForge's and the EAGLE authors') or "vllm".
      layers: layers behind which the three features are taken; None leaves the config silent.
      seed: seed of the weights.
    """
    rng = np.random.default_rng(seed)
    d, f = policy.hidden_size, policy.mlp_size
    queries, keys = policy.num_heads * policy.head_dim, policy.num_kv_heads * policy.head_dim

    def random(*shape):
        return (rng.standard_normal(shape) * shape[-1] ** -0.5 * 1.5).astype(np.float32)

    def scale():
        return (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)

    layer = {
        "self_attn.q_proj": random(queries, 2 * d),
        "self_attn.k_proj": random(keys, 2 * d),
        "self_attn.v_proj": random(keys, 2 * d),
        "self_attn.o_proj": random(d, queries),
        "mlp.gate_proj": random(f, d),
        "mlp.up_proj": random(f, d),
        "mlp.down_proj": random(d, f),
        "input_layernorm": scale(),
        "hidden_norm": scale(),
        "post_attention_layernorm": scale(),
    }
    tensors = {"fc.weight": random(d, 3 * d), "norm.weight": scale()}
    tensors |= {f"midlayer.{name}.weight": array for name, array in layer.items()}
    if tokens is not None:
        tokens = np.asarray(tokens)
        known = np.zeros(policy.vocab_size, bool)
        known[tokens] = True
        tensors |= {
            "lm_head.weight": 3 * random(len(tokens), d),
            "d2t": tokens.astype(np.int64) - np.arange(len(tokens)),
            "t2d": known,
        }
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": f,
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
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content))
    stored = {name.replace("midlayer", PREFIXES[layout]): array for name, array in tensors.items()}
    safetensors.numpy.save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def greedy_chain(
    tensors, policy: ModelConfig, embed, features, tokens, depth: int, norm_before_residual: bool = False
) -> list[int]:
    """Returns the `depth` tokens that a greedy chain drafts, one full forward pass of the head for each.

    Args:
      tensors: from `write_eagle3`, with a draft vocabulary.
      policy: the policy's architecture.
      embed: [V, d], the policy's embeddings.
      features: [n, 3, d], the low, middle and high features of the first n positions.
      tokens: int [n], the token behind each of them.
      depth: length of the chain.
      norm_before_residual: the layer adds to the normed hidden state.
    """
    hidden = [tensors["fc.weight"] @ feature.reshape(-1) for feature in features]
    tokens, drafted = list(tokens), []
    for _ in range(depth):
        embedded = embed[np.asarray(tokens)]
        output = _outputs(tensors, policy, np.stack(hidden), embedded, norm_before_residual)[-1]
        logits = tensors["lm_head.weight"] @ norm(output, tensors["norm.weight"], policy)
        best = int(np.argmax(logits))
        drafted.append(best + int(tensors["d2t"][best]))
        hidden.append(output)
        tokens.append(drafted[-1])
    return drafted


def norm(x, weight, policy):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + policy.norm_epsilon) * weight


def rotate(x, positions, policy):
    """Queries or keys [T, heads, D] at their positions [T]."""
    dim = x.shape[-1]
    angles = positions[:, None, None] * policy.rope_theta ** (-np.arange(0, dim, 2) / dim)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
    )


def attend(q, k, v, causal=False):
    """Outputs [m, heads * D] of queries [m, heads, D] over keys and values [n, kv heads, D]."""
    k, v = (np.repeat(y, q.shape[1] // k.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), v).reshape(len(q), -1)


def silu(x):
    return x / (1 + np.exp(-x))


def _outputs(tensors, policy, hidden, embedded, norm_before_residual):
    """Outputs [n, d] of the layer over n pairs, causal."""
    layer = {
        name.removeprefix("midlayer.").removesuffix(".weight"): array.T for name, array in tensors.items()
    }
    n, dim = len(hidden), policy.head_dim
    normed_hidden = norm(hidden, layer["hidden_norm"], policy)
    x = np.concatenate([norm(embedded, layer["input_layernorm"], policy), normed_hidden], axis=-1)
    q, k, v = ((x @ layer[f"self_attn.{name}_proj"]).reshape(n, -1, dim) for name in "qkv")
    q, k = (rotate(y, np.arange(n), policy) for y in (q, k))
    residual = normed_hidden if norm_before_residual else hidden
    residual = residual + attend(q, k, v, causal=True) @ layer["self_attn.o_proj"]
    y = norm(residual, layer["post_attention_layernorm"], policy)
    return residual + (silu(y @ layer["mlp.gate_proj"]) * (y @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
