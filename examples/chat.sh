#!/usr/bin/env bash
# One chat completion with curl:  examples/chat.sh "What is a lighthouse?"   (PORT=30000)
set -euo pipefail

question=${1:-What is a lighthouse?}
url=http://127.0.0.1:${PORT:-30000}

body=$(python3 -c 'import json, sys
print(json.dumps({"model": "default", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 128}))' "$question")
curl --fail-with-body --silent --show-error "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$body" |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
