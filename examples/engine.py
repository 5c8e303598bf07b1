"""Sparse decode without a server: SGLang's offline engine.

    .venv/bin/python examples/engine.py MODEL_FOLDER

``python scripts/sample_model.py`` prints the folder of a small model.
"""

import sys

from sglang_sparse import cpu

# Does nothing on a CUDA host. Elsewhere it has to come before SGLang is imported.
ON_CPU = cpu.activate()

import sglang  # noqa: E402

import sglang_sparse  # noqa: E402


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("error: give the model's folder")
    device = {"device": "cpu", "mem_fraction_static": 0.5, "max_total_tokens": 16384} if ON_CPU else {}
    arguments = sglang_sparse.engine_kwargs(
        model_path=sys.argv[1],
        sparse_decode_gamma=0.95,
        sparse_decode_min_context=512,
        **device,
    )
    text = "The lighthouse keeper wrote down the weather. " * 150 + "On the next morning the sea was"
    with sglang.Engine(**arguments) as engine:
        result = engine.generate(text, {"temperature": 0, "max_new_tokens": 24})
        print(result["text"])
        sparse = engine.get_server_info()["internal_states"][0]["sparse_decode"]
        print(f"{sparse['kept_fraction']:.1%} of the KV blocks attended to")


# SGLang starts processes that import this file again.
if __name__ == "__main__":
    main()
