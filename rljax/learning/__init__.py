"""What policy, critic, and EAGLE heads train with: packing, accumulation, the optimizer."""
