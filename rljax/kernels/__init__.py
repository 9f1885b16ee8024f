"""Operations that decide the engine's speed on an accelerator: a folder an operation, a file a backend.

    noisy_argmax/        the sampled token and its log-probability, the noise made in place
    token_logprobs/      log-probabilities of given tokens, and entropy, without the logits
    tree_attention/      draft nodes against the KV cache and each other; decoding is one node
    quantized_product/   rows times a matrix in 8 or 4 bits
    round_to_nearest/    a matrix to 8 or 4 bits, a scale a group
    compaction/          an accepted path's keys and values into the KV cache, in place
    packed_attention/    attention of packed rows in training, scoring and prefill
    head_products/       a layer's queries, keys and values, with their norms and rotation
    gated_product/       an MLP's gate and up, and the activation between them

In each, `base.py` is the contract and the reference in plain JAX (the backend `xla`), `mosaic_gpu.py` a
Pallas kernel for Hopper, `mosaic_tpu.py` one for TPUs, `triton.py` one for NVIDIA GPUs; `interpret_gpu`,
`interpret_tpu` and `interpret_triton` run these on a CPU, for tests. The folder's `__init__.py` has the
operation's one public function; who computes it is the config's `kernels`: a name, names in the order in
which they are tried, or null for what `tuned.py` knows about device and policy. See `switch.py` and
`docs/kernels.md`.
"""
