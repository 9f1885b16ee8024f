"""Environments of several turns: the protocol, where they run, adapters for those of other libraries."""
