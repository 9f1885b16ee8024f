"""google-jetstream 0.2.2 made importable without TensorFlow, and run on today's JAX.

It imports seqio for tokenizers that are not used here, and its orchestrator calls `jax.tree_map`, which JAX
has removed. Both are put right in the process that calls this: a test's or a driver's, never a library's.
"""

import importlib.util
import sys
import types

import jax

NEEDED = ("jetstream", "grpc", "tiktoken")


def missing() -> list[str]:
    """Packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def make_importable() -> None:
    """To be called before anything of `jetstream` is imported."""
    if "seqio" not in sys.modules and importlib.util.find_spec("seqio") is None:
        package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
        for name in ("Vocabulary", "SentencePieceVocabulary"):
            setattr(vocabularies, name, type(name, (), {}))
        package.vocabularies = vocabularies
        sys.modules |= {"seqio": package, "seqio.vocabularies": vocabularies}
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map
