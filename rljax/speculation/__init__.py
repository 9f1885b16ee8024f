"""Speculative decoding: one pass (propose, choose, verify, tell), and the managers that steer it."""
