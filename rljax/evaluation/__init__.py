"""How good a policy is: several samples a problem, estimators, and intervals (docs/evaluation.md)."""
