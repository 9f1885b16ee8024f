"""Shared by the training of policy, critic and EAGLE heads: packing, accumulation, the optimizer."""
