"""An OpenAI-compatible completions server without a model: it answers RULER's and the needle's questions by reading."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake"


def right_answer(prompt: str) -> str:
    """What a perfect reader completes `prompt` with."""
    if found := re.search(r"access code of the archive in (\w+) is$", prompt):
        return " " + found_once(rf"archive in {found[1]} is (\d+)\.", prompt)
    if found := re.search(r"special magic \w+ for (\S+) mentioned in the provided text is$", prompt):
        return " " + found_once(rf"for {re.escape(found[1])} is: (\S+)\.", prompt)
    # An example with an answer comes first.
    if found := re.search(r"assigned the value (\d+) in[^?]*they are:$", prompt[prompt.rfind("Question:") :]):
        return " " + " ".join(chain(found[1], prompt))
    if prompt.endswith("appear most often in the list are:"):
        return listed(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", prompt), 10)
    if prompt.endswith("most frequently appeared words are:"):
        text = prompt[prompt.index("coded words.") : prompt.rindex("Question:")]
        return listed(re.findall(r"\b[a-z]{6}\b", text), 3)
    return " I do not know"


def found_once(pattern: str, prompt: str) -> str:
    (value,) = set(re.findall(pattern, prompt))
    return str(value)


def chain(value: str, prompt: str) -> list[str]:
    text = prompt[prompt.rindex("Memorize and track") :]
    names = re.findall(rf"VAR (\w+) = {value}\b", text)
    for name in names:
        names += [other for other in re.findall(rf"VAR (\w+) = VAR {name}\b", text) if other not in names]
    return names


def listed(words: list[str], count: int) -> str:
    return " " + ", ".join(word for word, _ in Counter(words).most_common(count))


class FakeServer:
    """`count` gives the tokens of a prompt, `reply` the changes to the completion of a prompt."""

    def __init__(self) -> None:
        self.url = ""
        self.context = 32768
        self.count: Callable[[str], int] | None = None
        self.reply: Callable[[str], dict[str, Any]] = lambda prompt: {}
        self.status = 200
        self.requests: list[dict[str, Any]] = []

    def page(self, path: str) -> dict[str, Any] | None:
        if path == "/v1/models":
            return {"data": [{"id": MODEL, "max_model_len": self.context}]}
        if path == "/server_info":
            return {"version": "fake", "internal_states": [{"sparse_decode": {"kept_fraction": 0.25}}]}
        return None

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        prompt = body["prompt"]
        choice = {"index": 0, "text": right_answer(prompt), "finish_reason": "stop", **self.reply(prompt)}
        usage = {} if self.count is None else {"usage": {"prompt_tokens": self.count(prompt)}}
        return {"choices": [choice], **usage}


@contextmanager
def serving() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = fake.page(self.path)
            self.send(200 if page else 404, page or {"message": "no such page"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions" or fake.status != 200:
                self.send(fake.status, {"message": "the model has stopped"})
            else:
                self.send(200, fake.complete(body))

        def send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
