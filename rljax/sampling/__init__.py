"""The sampling distribution and the noise field, which choose a token from a row of logits."""
