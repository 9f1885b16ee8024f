"""Rollouts: continuous batching of requests, tools, and rewarded groups."""
