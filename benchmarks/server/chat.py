"""Asks a real server for facts planted in a long document; prints its answers and what decoding read.

    python -m benchmarks chat --model DIR --tokens 12000 --flags "--sparse-decode"

Exits 1 if a fact is not found. Times nothing, so it adds no rows to the results.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from benchmarks.common_arguments import make_parser, positive
from benchmarks.machine import require_cuda, require_package

from .launch import Server

FACTS = {"Amber": "4821", "Birch": "7350", "Cedar": "1968", "Delta": "5517", "Ember": "3094"}
FILLER = [
    "The morning was calm and the harbour lay still under a pale sky.",
    "Workers carried crates along the pier while gulls circled above.",
    "A letter arrived from the city with news of the coming season.",
    "In the afternoon the wind turned and small waves broke on the stones.",
    "Children played by the old wall until the bells rang for supper.",
    "The ledger on the desk listed every shipment of the past year.",
]


def document(tokens: int) -> str:
    """About `tokens` tokens of English with the facts planted at even depths."""
    sentences = [FILLER[i % len(FILLER)] for i in range(tokens // 14)]
    for index, (name, code) in enumerate(FACTS.items()):
        sentences.insert(round((index + 0.5) / len(FACTS) * len(sentences)), f"The access code of {name} is {code}.")
    return " ".join(sentences)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("chat", __doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=positive, default=3000)
    parser.add_argument("--flags", default="--sparse-decode", help="flags of sglang.launch_server")
    parser.add_argument("--log", type=Path, default=Path("chat.log"))
    args = parser.parse_args(arguments)
    require_cuda()
    require_package("sglang")
    found = 0
    with Server(args.model, shlex.split(args.flags), args.log) as server:
        print(f"ready after {server.start_seconds:.0f} s: {' '.join(server.command)}")
        print("Q: What is the capital of France? A:", server.chat("What is the capital of France?", 32).strip())
        text = document(args.tokens)
        for name, code in FACTS.items():
            asked = f"What is the access code of {name}? Answer with the number only: the access code of {name} is"
            answer = server.chat(f"{text}\n\n{asked}", 12).strip()
            found += code in answer
            print(f"Q: {name}? A: {answer!r} ({'right' if code in answer else 'WRONG, it is ' + code})")
        info = server.sparse_info()
        if info:
            info.pop("kept_fraction_by_layer_and_head")
        print(f"{found} of {len(FACTS)} facts found; /server_info: {json.dumps(info)}")
    return 0 if found == len(FACTS) else 1


if __name__ == "__main__":
    from benchmarks.__main__ import main as driver

    sys.exit(driver(["chat", *sys.argv[1:]]))
