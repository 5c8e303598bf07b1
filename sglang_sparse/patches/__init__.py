"""Patches for forks of SGLang that do not load plugins: `python -m sglang_sparse.patches`."""
