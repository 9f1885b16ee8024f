"""What a run, an evaluation, a server and a rollout worker are built of: the policy, new or from disk, and
what decodes with it.
"""
