"""Adapters: environments of other libraries, as Python objects and without a network, in this protocol."""
