"""Asks the same question densely and with two gammas, in one batch, and prints what each answer read.

    .venv/bin/python examples/per_request_gamma.py [http://127.0.0.1:30000]

The server is one that ``make serve`` keeps running in another terminal; `docs/control.md` has all fields.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
text = "The lighthouse keeper wrote down the weather. " * 150 + "On the next morning the sea was"


def ask(wanted: dict) -> str:
    """A completion with the request's own setting; the usage of the last chunk says what it read."""
    stream = client.completions.create(
        model=model,
        prompt=text,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"custom_params": {"sparse_decode": wanted}},
    )
    answer = ""
    for chunk in stream:
        usage = chunk.usage
        answer += chunk.choices[0].text if chunk.choices else ""
    read = usage.model_extra["sparse_decode"]
    return f"{wanted}: {answer!r}, read {read['kept_fraction']:.1%} of {read['blocks']} blocks"


with ThreadPoolExecutor() as pool:
    for line in pool.map(ask, [{"dense": True}, {"gamma": 0.99}, {"gamma": 0.8}]):
        print(line)
