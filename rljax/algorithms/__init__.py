"""What makes it RL: advantages, policy losses, KL estimators, reward shaping and dynamic sampling."""
