"""The sampling distribution and the noise field: which token a row of logits becomes."""
