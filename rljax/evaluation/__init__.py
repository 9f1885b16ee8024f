"""Evaluation of a policy: several samples per problem, estimators, and intervals (docs/evaluation.md)."""
