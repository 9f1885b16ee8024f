"""Work of passes and updates in FLOPs and bytes, and its time.

Work is counted from the shards that a device really holds, by the shardings of the run: a weight that is
replicated is computed with, and read, on every device. Everything else is counted from shapes. XLA's own
counts are in the plan for comparison only: it counts the body of a loop once, and products that it hands to a
library not at all.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from rljax.planning.hardware import Hardware, Work
from rljax.planning.passes import PassWork, attention_flops, logit_bytes
from rljax.planning.programs import PlannedRun, device_bytes, shard_size

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def _all_reduce(size: float, devices: int) -> float:
    """Bytes that a device sends in a ring all-reduce of `size` bytes."""
    return 2.0 * size * (devices - 1) / devices


class Roofline:
    """Counts the work of a planned run's passes on some hardware."""

    def __init__(self, run: PlannedRun, hardware: Hardware) -> None:
        self._run, self._hardware = run, hardware
        self._model, self._mesh = run.model, run.config.mesh
        self._itemsize = 2 if run.config.policy.compute_dtype == "bfloat16" else 4
        params = run.decode_params
        head = params["embed"] if run.model.tie_embeddings else params["lm_head"]
        self._layers = sum(shard_size(layer[name]) for layer in params["layers"] for name in _MATRICES)
        self._head = shard_size(head)
        # Parts that are gathered are computed and read whole.
        split = run.config.engine.weights == "fsdp"
        parts = self._mesh.fsdp if split else 1
        self._layers, self._head = parts * self._layers, parts * self._head
        # Of an input embedding that is not the LM head, a pass reads a row a token.
        unread = 0 if run.model.tie_embeddings else device_bytes(params["embed"])
        read = parts * (device_bytes(params) - unread)
        self._gathered = read * (parts - 1) / parts
        state, tensor = run.state, self._mesh.tensor
        self._pass = PassWork(
            self._layers + self._head,
            read,
            device_bytes(state.cache) / (state.batch * run.buckets.cache[-1]),
            attention_flops(run.model) / tensor,
            logit_bytes(run.model) / tensor,
        )

    @property
    def _batch_parts(self) -> int:
        return self._mesh.data * self._mesh.fsdp

    def seconds(self, work: Work) -> float:
        """Returns the time of some work on every device of the mesh."""
        compute_dtype = self._run.config.policy.compute_dtype
        return self._hardware.seconds(work, compute_dtype, self._mesh.tensor, self._mesh.num_devices)

    def _layer_sums(self, rows: float) -> float:
        """Bytes of the all-reduces over `tensor` of a forward pass: two a layer (Megatron-LM)."""
        size = rows * self._model.hidden_size * 4  # products are float32
        return 2 * self._model.num_layers * _all_reduce(size, self._mesh.tensor)

    def decode_pass(self, slots: int, rows: int, length: int) -> Work:
        """Returns the work of a pass over `rows` tokens of `slots` slots, whose cache has `length` positions:
        a decode step with rows = slots, a verifying pass with more.

        The whole bucket of the cache is read: the reference attention does so.
        """
        local = rows / self._batch_parts
        # Rows of a verifying pass that are on another device than their slot travel; they are not counted.
        return dataclasses.replace(
            self._pass(local, slots * length, length),
            tensor_bytes=self._layer_sums(local),
            batch_bytes=self._gathered,
        )

    def prefill(self, prompts: int, length: int) -> Work:
        """Returns the work of prefilling prompts of a padded length."""
        tokens = prompts * length / self._batch_parts
        without_logits = dataclasses.replace(self._pass, products=self._layers, logits=0.0)
        return dataclasses.replace(
            without_logits(tokens, prompts * length, length),
            tensor_bytes=self._layer_sums(tokens),
            batch_bytes=self._gathered,
        )

    def microbatch(self, backward: bool = True) -> Work:
        """Returns the work of one micro-batch: its gradients, or only its logprobs."""
        run, training = self._run, self._run.config.training
        tokens = training.rows_per_microbatch * training.pack_length / self._batch_parts
        state = run.train_state
        params, trained = state.params, state.params if state.factors is None else state.factors
        whole = (
            sum(math.prod(layer[name].shape) for layer in params["layers"] for name in _MATRICES)
            / self._mesh.tensor
        )
        head = math.prod((params["embed"] if self._model.tie_embeddings else params["lm_head"]).shape)
        forward = tokens * (2.0 * whole + training.pack_length * self._pass.attention)
        head_flops = 2.0 * tokens * head
        # The backward pass has two products for each of the forward pass; under LoRA one, as no gradient of a
        # matrix is computed.
        products = 2 if state.factors is None else 1
        passes = 1 if not backward else 1 + products + training.remat
        # Logits are computed again in the backward pass, a chunk at a time.
        flops = passes * forward + (2 + products if backward else 1) * head_flops
        weights = (whole + head / self._mesh.tensor) * self._itemsize
        # About 16 arrays of the residual stream's size a layer are written and read, and gradients added up.
        stream = tokens * self._model.hidden_size * self._itemsize * self._model.num_layers * 16
        read = passes * (weights + 2 * stream) + (
            12.0 * sum(map(shard_size, jax.tree.leaves(trained))) if backward else 0
        )
        gathered = (whole + head / self._mesh.tensor) * self._itemsize
        fsdp, data = self._mesh.fsdp, self._mesh.data
        travelling = (2 if backward else 1) * gathered * (fsdp - 1) / fsdp
        if backward and state.factors is None:
            reduced = (whole + head / self._mesh.tensor) * 4.0
            travelling += reduced * (fsdp - 1) / fsdp + _all_reduce(reduced / fsdp, data)
        return Work(flops, read, passes * self._layer_sums(tokens), travelling)

    def optimizer(self) -> Work:
        """Returns the work of applying the gradients: weights and two moments are read and written.
        Under LoRA those of the factors, and matrices are merged.
        """
        state = self._run.train_state
        trained = state.params if state.factors is None else state.factors
        local = sum(map(shard_size, jax.tree.leaves(trained)))
        merged = 0 if state.base is None else sum(map(shard_size, jax.tree.leaves(state.base)))
        rank = 0 if state.base is None else self._run.config.policy.lora.rank
        return Work(2.0 * merged * rank, 28.0 * local + 2.0 * merged * self._itemsize)


def pass_sizes(run: PlannedRun) -> Sequence[tuple[int, int]]:
    """Returns (slots, rows) of all verifying passes of a run."""
    buckets = run.buckets
    batches = buckets.verified_batches(run.config.speculation.max_batch)
    return [(batch, rows) for batch in batches for rows, _ in buckets.passes(batch)]
