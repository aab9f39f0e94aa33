#!/usr/bin/env bash
# The API with nothing but curl.  Start `penstock serve` first.
set -euo pipefail

url=${PENSTOCK_URL:-http://127.0.0.1:8000}
json='Content-Type: application/json'

echo "-- ready?"
curl -sS -o /dev/null -w '%{http_code}\n' "$url/ready"

echo "-- the model and its context length"
curl -sS "$url/v1/models"
model=$(curl -sS "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

echo "-- a chat, streamed"
curl -sSN "$url/v1/chat/completions" -H "$json" -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
  "max_tokens": 20, "stream": true, "stream_options": {"include_usage": true}
}'

echo "-- a completion of token ids, with logprobs"
tokens=$(curl -sS "$url/tokenize" -H "$json" -d '{"prompt": "Once upon a time"}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["tokens"])')
curl -sS "$url/v1/completions" -H "$json" \
    -d '{"model": "'"$model"'", "prompt": '"$tokens"', "max_tokens": 4, "temperature": 0, "logprobs": 2}'
echo
