"""Streams an answer from a running server with the ``openai`` package, then shows how much of the KV cache was read.

    .venv/bin/python examples/openai_client.py "What is a lighthouse?" [http://127.0.0.1:30000]

The server is one that ``make serve`` keeps running in another terminal.
"""

import json
import sys
import urllib.request

from openai import OpenAI

question = sys.argv[1] if len(sys.argv) > 1 else "What is a lighthouse?"
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:30000"

client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    temperature=0,
    max_tokens=128,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

with urllib.request.urlopen(f"{url}/server_info") as answer:
    sparse = json.load(answer)["internal_states"][0].get("sparse_decode")
if sparse is None:
    print("The server runs without --sparse-decode.")
else:
    print(f"KV blocks attended to since the start: {sparse['kept_fraction']:.1%}, in {sparse['steps']} decode steps")
