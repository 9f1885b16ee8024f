"""A small model of the policy's family drafts, as SpecActor's 0.5B and 1.5B ones do for a 32B policy.

Any checkpoint with a supported architecture and the policy's vocabulary can draft. It decodes on the device,
beside the target (`rljax/engine/companion.py`); this file loads and checks it. By default it stays as it is:
in SpecActor's measurements acceptance stayed the same over a hundred steps (section 6). With `slices` it is
trained on the policy's responses (`small_model_training.py`).

Models of one family may pad their embeddings differently (Qwen2.5: 151,936 rows up to 3B, 152,064 above),
with the same tokens. So a vocabulary of another size is accepted if the tokenizers agree: rows beyond the
policy's are cut off, and tokens beyond the small model's are never drafted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from drafters.arguments import SmallModelArguments
from drafters.base import Drafter, Outcome
from drafters.small_model_training import SmallModelTraining, trained_params
from rljax.engine.companion import Companion
from rljax.engine.draft_tree import DraftStrategy
from rljax.engine.engine import DecodeEngine
from rljax.errors import ConfigError, UserError
from rljax.hub import local_directory
from rljax.models.config import ModelConfig
from rljax.models.huggingface import load_model_config, load_params
from rljax.models.sharding import mesh_of_a_drafter
from rljax.models.tokenizer import Tokenizer
from rljax.models.transformer import Params
from rljax.numerics.rows import Numerics

_LENGTHS = (2, 4, 8)  # lengths of chains to choose from


class SmallModelDrafter(Drafter):
    """A checkpoint that drafts.

    Args:
      arguments: see `SmallModelArguments`.

    Attributes:
      config: its architecture; after `check` with a vocabulary that is at most the policy's.
      training: see `SmallModelTraining`; None without `slices`.

    Raises:
      ConfigError: there is no such checkpoint, or its architecture is not supported.
    """

    on_host = False
    training: SmallModelTraining | None

    def __init__(self, arguments: SmallModelArguments) -> None:
        self.name = arguments.path
        self.dtype = arguments.dtype
        self.layout = arguments.layout
        try:
            self.path = local_directory(self.name, weights=False)
            self.config = load_model_config(self.path)
        except UserError as error:
            raise ConfigError(f"speculation.args.path: {error}") from error
        self._companion: Companion | None = None
        self._newest: Params | None = None  # weights that it will draft with from the next rollout on
        self.training = None
        if arguments.slices:
            settings = arguments.slices, arguments.rows, arguments.learning_rate
            self.training = SmallModelTraining(self.load, self.draft_with, *settings)

    def check(self, policy: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Raises a ConfigError unless the vocabulary is that of the policy. Without a tokenizer only the
        sizes can be compared.
        """
        size, policy_size = self.config.vocab_size, policy.vocab_size
        same, used = size == policy_size, policy_size if tokenizer is None else tokenizer.vocab_size
        if not same and tokenizer is not None and (self.path / "tokenizer.json").is_file():
            same = Tokenizer.load(self.path).same_tokens(tokenizer)
        if not same or size < used:
            raise ConfigError(
                f"speculation.args.path: {self.path} has vocab_size {size} where the policy has"
                f" {policy_size}, and not the policy's {used} tokens; use a model of the same family"
            )
        rows = min(size, policy_size)
        padding = rows - policy.used_rows
        self.config = dataclasses.replace(self.config, vocab_size=rows, padding_rows=padding)

    def companion(self, target: DecodeEngine) -> Companion:
        """Loads the weights for drafting beside `target`; call `check` before."""
        mesh = self.mesh(target.mesh)
        numerics = self.numerics(target.numerics, mesh)
        self._companion = self._beside(target, self.load(numerics.compute_dtype), numerics, mesh)
        return self._companion

    def load(self, dtype: str) -> Params:
        """Returns the checkpoint's weights in a dtype; call `check` before."""
        try:
            path = local_directory(self.name)
            params = load_params(path, load_model_config(path), dtype)
        except UserError as error:
            raise ConfigError(f"speculation.args.path: {error}") from error
        rows = {
            name: params[name][: self.config.vocab_size] for name in ("embed", "lm_head") if name in params
        }
        return params | rows

    def _beside(
        self, target: DecodeEngine, params: Params, numerics: Numerics, mesh: Mesh | None
    ) -> Companion:
        most = target.buckets.max_drafts
        lengths = sorted({min(length, most) for length in _LENGTHS})
        chains = tuple(DraftStrategy(length, 1, length) for length in lengths)
        return Companion(target, self.config, params, numerics, mesh, chains)

    def mesh(self, policy: Mesh | None) -> Mesh | None:
        """Returns the mesh that it drafts on beside a policy on that one; call `check` before."""
        return None if policy is None else mesh_of_a_drafter(self.config, policy, self.layout == "split")

    def numerics(self, policy: Numerics, mesh: Mesh | None) -> Numerics:
        """Returns its numerics on `mesh`, given those of the policy."""
        kernels = policy.kernels
        if kernels.mesh is not None:
            kernels = dataclasses.replace(kernels, mesh=mesh)
        dtype = policy.compute_dtype if self.dtype is None else self.dtype
        return dataclasses.replace(policy, compute_dtype=dtype, kernels=kernels)

    # -- what it drafts for ----------------------------------------------------------------------------------

    def reads(self, policy: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.check(policy, tokenizer)

    def attach(self, engine: DecodeEngine) -> Companion:
        if self.training is not None:
            self.training.attach(engine, self.config, SmallModelDrafter.numerics(self, engine.numerics, None))
        return self.companion(engine)

    def refresh(self, params: Params) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            self._companion.use(newest)

    def metrics(self) -> dict[str, float]:
        """Returns `caught_up`: tokens of the last rollout that took the companion a pass beside drafting; and
        as `sft/...` the metrics of the last update.
        """
        caught_up = {} if self._companion is None else {"caught_up": float(self._companion.extended)}
        trained = {} if self.training is None else self.training.metrics
        return caught_up | {f"sft/{name}": value for name, value in trained.items()}

    # -- its training ----------------------------------------------------------------------------------------

    def draft_with(self, params: Params) -> None:
        """Sets the weights that it drafts with from the next rollout on."""
        self._newest = params

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        if self.training is not None:
            self.training.learn(outcomes)

    def state(self) -> dict[str, np.ndarray]:
        return {} if self.training is None else self.training.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; with `slices: 0` it drafts with the weights, and trains them no further."""
        if self.training is None:
            self.draft_with(trained_params(state))
        else:
            self.training.load_state(state)
