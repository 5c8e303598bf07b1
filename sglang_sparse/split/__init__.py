"""The split key cache (docs/kv_format.md): keys in 2-bit codes, bounds and 8-bit residuals, values as they are."""
