"""Policies of the sizes that training is measured at."""

from engine_benchmarks.policies import POLICIES as _ENGINE_POLICIES
from engine_benchmarks.policies import qwen3

POLICIES = {
    "2M": _ENGINE_POLICIES["2M"],
    "25M": _ENGINE_POLICIES["25M"],
    "50M": qwen3(vocab=8192, hidden=768, layers=7, heads=12, kv_heads=4, mlp=2048),
    # Shaped like small published ones: the embedding is a quarter of the weights.
    "100M": qwen3(vocab=51_200, hidden=512, layers=17, heads=4, kv_heads=2, mlp=2560),
    # Nearly all of its memory is logits.
    "1 layer": qwen3(vocab=32_000, hidden=64, layers=1, heads=1, kv_heads=1, mlp=128),
}
