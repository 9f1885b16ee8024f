"""Who decodes what, and when: requests, continuous batching, and the records that rollouts leave."""
