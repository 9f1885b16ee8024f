"""The decode engine: noise, sampling, KV cache, shape buckets and the pool of compiled executables."""
