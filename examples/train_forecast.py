"""Trains forecast heads for a model, for --sparse-decode-forecast, on text that every Python has: its documentation.

    python examples/train_forecast.py MODEL_FOLDER heads.safetensors [flags of sglang_sparse.forecast.train]

Small by default, so that it runs on a CPU. For a model in use, give text like that of its requests, and as long:

    python -m sglang_sparse.forecast.train --model MODEL_FOLDER --data text.jsonl --out heads.safetensors --length 32768
    python -m sglang.launch_server --model-path MODEL_FOLDER --sparse-decode --sparse-decode-offload \
        --sparse-decode-forecast heads.safetensors
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from sglang_sparse.forecast.train import main

SMALL = ("--length", "512", "--steps", "20", "--batch", "1", "--queries", "32", "--evaluate-every", "10")

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("error: give the model's folder and the file of heads to write")
    model, out, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.jsonl"
        texts = [topics[name] for name in sorted(topics)][:12]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sys.exit(main(["--model", model, "--data", str(data), "--out", out, *SMALL, *flags]))
