"""Measurements of the operations of rljax/kernels: one file per operation, and shared modules."""
