#!/usr/bin/env bash
# Finds settings for a model and prompts, then serves with them:
#
#   examples/calibrate_then_serve.sh MODEL_FOLDER prompts.jsonl [flags of sglang.launch_server]
#
# `prompts.jsonl` has one {"text": ...} or {"messages": [...]} a line. CALIBRATE_FLAGS has more flags of the search, such as
# "--gamma-per head"; PYTHON is the interpreter. Without a GPU both steps take a CPU, and only small models make sense.
set -euo pipefail

[[ $# -ge 2 ]] || { echo "error: give the model's folder and the file of prompts" >&2; exit 2; }
model=$1 prompts=$2
shift 2
python=${PYTHON:-python3}
config=$(mktemp -d)/sparse.json

# shellcheck disable=SC2086
"$python" -m sglang_sparse.calibrate --model "$model" --prompts "$prompts" --target-kl 0.001 --config "$config" ${CALIBRATE_FLAGS:-}
echo "Serving with $config:"
cat "$config"
exec "$python" -m sglang.launch_server --model-path "$model" --sparse-decode --sparse-decode-config "$config" "$@"
