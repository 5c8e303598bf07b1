"""The KV cache in host memory, and a cache of its blocks on the GPU: docs/offload.md."""
