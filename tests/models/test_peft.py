"""Adapters in PEFT's format: there and back, against PEFT itself, and what is refused."""

import jax
import numpy as np
import pytest
import safetensors.numpy

from rljax.config import LoraConfig
from rljax.errors import CheckpointError, ConfigError
from rljax.models.huggingface import load_model_config, load_params
from rljax.models.lora import Lora, init_factors, matrices_of, merge, with_matrices
from rljax.models.peft import load_adapter, save_adapter
from tests.models.checkpoints import make_checkpoint
from tests.models.test_huggingface import assert_same_logits, edit_json, our_logits, reference_logits

SETTINGS = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))


def stirred_factors(model, config=SETTINGS, seed=0):
    """Factors as after training: B is not 0, and the change they make is."""
    rng = np.random.default_rng(seed)
    factors = init_factors(model, Lora.of(config, model), "kaiming", seed)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32), factors)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen2 that transformers has made, biases included."""
    directory = tmp_path_factory.mktemp("base")
    make_checkpoint(directory, "qwen2")
    model = load_model_config(directory)
    return directory, model, load_params(directory, model)


def saved(directory, base, config=SETTINGS, **settings):
    factors = stirred_factors(base[1], config)
    save_adapter(directory, base[1], config, factors, str(base[0]), "digest", **settings)
    return factors


def test_there_and_back(base, tmp_path):
    factors = saved(tmp_path / "adapter", base)
    found, digest = load_adapter(tmp_path / "adapter", base[1], SETTINGS)
    assert digest == "digest" and jax.tree.structure(found) == jax.tree.structure(factors)
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(factors), strict=True):
        np.testing.assert_array_equal(ours, expected)
    saved(tmp_path / "half", base, dtype="bfloat16")
    half, _ = load_adapter(tmp_path / "half", base[1], SETTINGS)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(half))


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same_logits(base, tmp_path, rslora):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = SETTINGS.model_copy(update={"rslora": rslora})
    factors = saved(tmp_path / "adapter", base, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(base[0])
    theirs = reference_logits(peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval())
    lora = Lora.of(config, base[1])
    merged = with_matrices(base[2], merge(matrices_of(base[2], lora), factors, lora))
    assert_same_logits(our_logits(base[1], merged), theirs)
    assert np.abs(our_logits(base[1], base[2]) - theirs).max() > 0.1, "the adapter matters"


def test_an_adapter_that_peft_has_written(base, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base[0]), settings)
    model.save_pretrained(tmp_path / "adapter")
    factors, digest = load_adapter(tmp_path / "adapter", base[1], SETTINGS)
    assert digest is None
    lora = Lora.of(SETTINGS, base[1])
    merged = with_matrices(base[2], merge(matrices_of(base[2], lora), factors, lora))
    assert_same_logits(our_logits(base[1], merged), reference_logits(model.eval()))


def surplus(name):
    """The tensors and one more, by the last part of its name."""
    return lambda tensors: tensors | {f"base_model.model.{name}.weight": tensors[next(iter(tensors))]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, 'peft_type is "LOHA"; only LORA'),
        ({"use_dora": True}, "use_dora is true, which is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "all"}, 'bias is "all"; only none'),
        ({"init_lora_weights": "pissa"}, "which changes the base"),
        ({"r": 8}, "policy.lora.rank: 4, but the adapter in .* has 8; set policy.lora.rank to it"),
        ({"lora_alpha": 16}, "policy.lora.alpha: 6.0, but .* has 16"),
        ({"use_rslora": True}, "policy.lora.rslora: false, but .* has true"),
        (lambda t: dict(list(t.items())[1:]), "is missing; every layer must be adapted alike"),
        (lambda t: {name: x[:, :-1].copy() for name, x in t.items()}, "an adapter of another base"),
        (surplus("model.layers.9.self_attn.q_proj.lora_A"), "an adapter of another base"),
        (surplus("model.embed_tokens"), r"holds model.embed_tokens.weight besides LoRA's .*: a whole matrix"),
        (surplus("lm_head.lora_A"), "adapts lm_head"),
        (
            lambda t: {name: tensor for name, tensor in t.items() if "q_proj" not in name},
            r"the adapter in .* is of v_proj, down_proj; set policy.lora.targets=\[v_proj,down_proj\]",
        ),
    ],
)
def test_settings_and_tensors_that_do_not_fit(base, tmp_path, change, message):
    saved(tmp_path / "adapter", base)
    if isinstance(change, dict):
        edit_json(tmp_path / "adapter" / "adapter_config.json", **change)
    else:
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        safetensors.numpy.save_file(change(safetensors.numpy.load_file(file)), file)
    with pytest.raises(CheckpointError, match=message) as error:
        load_adapter(tmp_path / "adapter", base[1], SETTINGS)
    assert "\n" not in str(error.value)


def test_directories_that_hold_no_adapter(base, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no adapter_config.json"):
        load_adapter(base[0], base[1], SETTINGS)
    saved(tmp_path / "adapter", base)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin should be saved as safetensors"):
        load_adapter(tmp_path / "adapter", base[1], SETTINGS)
    with pytest.raises(ConfigError, match=r"policy.lora.rank: 4096 is more than the rank of a matrix q of"):
        Lora.of(LoraConfig(rank=4096), base[1])
