"""Measures what sparse decode costs in fidelity on one's own model, and finds settings within a target.

`python -m sglang_sparse.calibrate --help`. Runs the model with Hugging Face transformers and the server's own
estimators and rules; needs no server.
"""
