"""The trainer: packing, update step, checkpoints, the run directory, and the loop itself."""
