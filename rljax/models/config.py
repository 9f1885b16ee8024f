"""The architecture of a policy: one frozen dataclass for every supported architecture.

Qwen2/2.5 (attention bias), Qwen3 (query/key norms, head_dim independent of hidden_size / num_heads) and Llama
3.x (RoPE scaling) differ in a few switches; everything else is shared. Instances are hashable, so they are
static arguments of `jax.jit`.
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
class ModelConfig:
    """Architecture of a decoder-only transformer with pre-norm, SwiGLU, RoPE and grouped-query attention.

    Attributes:
      architecture: Hugging Face `model_type`: "qwen2", "qwen3" or "llama".
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, d.
      num_layers: number of decoder layers.
      num_heads: number of query heads, H.
      num_kv_heads: number of key/value heads, Hk; a divisor of H.
      head_dim: size of a head, D; need not be hidden_size / num_heads.
      mlp_size: width of the SwiGLU layer, f.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama-3 scaling, or None.
      norm_epsilon: epsilon of every RMSNorm.
      tie_embeddings: use the embedding as the LM head.
      attention_bias: add a bias to query, key and value projections (Qwen2).
      qk_norm: apply RMSNorm to each query and key head (Qwen3).
      max_positions: longest sequence that the policy is designed for, in tokens.
      padding_rows: rows at the end of the embedding that stand for no token of the tokenizer. Their logits
        are -inf wherever the policy samples or is scored.
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

    @property
    def used_rows(self) -> int:
        """Number of rows of the embedding that stand for tokens."""
        return self.vocab_size - self.padding_rows

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per key/value head, g."""
        return self.num_heads // self.num_kv_heads
