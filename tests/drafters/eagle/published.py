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

    def norm():
        return (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)

    layer = {
        "self_attn.q_proj": random(queries, 2 * d),
        "self_attn.k_proj": random(keys, 2 * d),
        "self_attn.v_proj": random(keys, 2 * d),
        "self_attn.o_proj": random(d, queries),
        "mlp.gate_proj": random(f, d),
        "mlp.up_proj": random(f, d),
        "mlp.down_proj": random(d, f),
        "input_layernorm": norm(),
        "hidden_norm": norm(),
        "post_attention_layernorm": norm(),
    }
    tensors = {"fc.weight": random(d, 3 * d), "norm.weight": norm()}
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
        logits = tensors["lm_head.weight"] @ _norm(output, tensors["norm.weight"], policy)
        best = int(np.argmax(logits))
        drafted.append(best + int(tensors["d2t"][best]))
        hidden.append(output)
        tokens.append(drafted[-1])
    return drafted


def _norm(x, weight, policy):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + policy.norm_epsilon) * weight


def _outputs(tensors, policy, hidden, embedded, norm_before_residual):
    """Outputs [n, d] of the layer over n pairs, causal."""
    layer = {name.removeprefix("midlayer."): array for name, array in tensors.items()}
    n, heads, kv_heads, dim = len(hidden), policy.num_heads, policy.num_kv_heads, policy.head_dim
    normed = _norm(embedded, layer["input_layernorm.weight"], policy)
    normed_hidden = _norm(hidden, layer["hidden_norm.weight"], policy)
    x = np.concatenate([normed, normed_hidden], axis=-1)
    angles = np.arange(n)[:, None] * policy.rope_theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotated(y):
        low, high = np.split(y, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    q = rotated((x @ layer["self_attn.q_proj.weight"].T).reshape(n, heads, dim))
    k = rotated((x @ layer["self_attn.k_proj.weight"].T).reshape(n, kv_heads, dim))
    v = (x @ layer["self_attn.v_proj.weight"].T).reshape(n, kv_heads, dim)
    k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
    residual = normed_hidden if norm_before_residual else hidden
    residual = residual + attended @ layer["self_attn.o_proj.weight"].T
    y = _norm(residual, layer["post_attention_layernorm.weight"], policy)
    gate = y @ layer["mlp.gate_proj.weight"].T
    up = y @ layer["mlp.up_proj.weight"].T
    return residual + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
