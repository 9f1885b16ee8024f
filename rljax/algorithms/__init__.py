"""Advantages, policy losses, KL estimators, reward shaping and dynamic sampling."""
