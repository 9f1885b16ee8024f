"""Managers: before every pass, which drafter drafts, how far, and how much of it is verified."""
