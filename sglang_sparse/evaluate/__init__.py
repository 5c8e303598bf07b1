"""Long-context evaluation of a running server, and a paired comparison of two runs: docs/evaluation.md.

``python -m sglang_sparse.evaluate ruler | needle | compare``. Nothing here reaches for the network: the only address
that is opened is the server's. What generates samples (lm-eval with datasets, a tokenizer) is imported only for that,
so that a run with ``--samples-from`` needs no more than lm-eval itself and tenacity.
"""
