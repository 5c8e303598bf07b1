"""Measures what sparse decode costs in fidelity on a model and prompts of one's own, and finds settings that hold a target.

`python -m sglang_sparse.calibrate --help`. Runs the model with Hugging Face transformers and the server's own estimators
and rules; needs no server.
"""
