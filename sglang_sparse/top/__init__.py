"""The live view of a server that decodes sparsely: `python -m sglang_sparse.top --url http://127.0.0.1:30000`."""
