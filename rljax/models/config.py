"""The architecture of a policy: one frozen dataclass for every supported architecture.

Qwen2/2.5 (attention bias), Qwen3 (query/key norms, head_dim independent of hidden_size / num_heads), Llama
3.x (RoPE scaling) and Gemma 3 (`GemmaParts`) differ in a few switches; everything else is shared. Instances
are hashable, so they are static arguments of `jax.jit`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 RoPE scaling ("The Llama 3 Herd of Models", 2024; `rope_type: llama3` in Hugging Face configs).

    Attributes:
      factor: ratio of the context length to that of pre-training.
      low_freq_factor: wavelengths above original_max_positions / low_freq_factor are divided by `factor`.
      high_freq_factor: wavelengths below original_max_positions / high_freq_factor are unchanged.
      original_max_positions: context length of pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class GemmaParts:
    """What Gemma 3 alone has ("Gemma 3 Technical Report", 2025): embeddings times the root of
    their width, GELU in the place of SiLU, norms that multiply by one more than their weights, also after
    attention and MLP, and layers with a base of rotary frequencies of their own, whose attention is local.
    Sequences are no longer than the window of these layers, so their attention is that of all others.

    Attributes:
      local_layers: whether each layer is local.
      local_rope_theta: base of the rotary frequencies of local layers.
      window: tokens that a local layer attends to.
      trained_positions: longest sequence of pre-training, in tokens.
    """

    local_layers: tuple[bool, ...]
    local_rope_theta: float
    window: int
    trained_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer with pre-norm, gated MLP, RoPE and grouped-query attention.

    Attributes:
      architecture: Hugging Face `model_type`: "qwen2", "qwen3", "llama" or "gemma3_text".
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, d.
      num_layers: number of decoder layers.
      num_heads: number of query heads, H.
      num_kv_heads: number of key/value heads, Hk; a divisor of H.
      head_dim: size of a head, D; need not be hidden_size / num_heads.
      mlp_size: width of the gated MLP, f.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama-3 scaling, or None.
      norm_epsilon: epsilon of every RMSNorm.
      tie_embeddings: use the embedding as the LM head.
      attention_bias: add a bias to query, key and value projections (Qwen2).
      qk_norm: apply RMSNorm to each query and key head (Qwen3, Gemma 3).
      max_positions: longest sequence that the policy is designed for, in tokens.
      padding_rows: rows at the end of the embedding that stand for no token of the tokenizer. Their logits
        are -inf wherever the policy samples or is scored.
      gemma: what Gemma 3 alone has; None for others.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32_768
    padding_rows: int = 0
    gemma: GemmaParts | None = None

    @property
    def used_rows(self) -> int:
        """Number of rows of the embedding that stand for tokens."""
        return self.vocab_size - self.padding_rows
