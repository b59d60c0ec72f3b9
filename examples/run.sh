#!/usr/bin/env bash
# run.sh - the first look: builds the engine, gets a small model and a text, lets the model write on an
# INT4 cache, and compares the cache formats. Under ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/packages.sh

model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
text=build/models/text.txt
engine=build/release/bin/kvc-engine

# step TEXT: says what comes next and how long it has taken so far.
step()
{
    printf '\n== %s (%d s)\n' "$1" "$SECONDS" >&2
}

step "packages"
need_packages gcc libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev
step "model and text"
examples/fetch_models.sh
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-engine
step "the model writes, its cache in INT4"
"$engine" generate --model "$model" --kv int4 --tokens 60 --prompt "The three primary colours are"
step "the formats compared: 2 chunks of 2048 tokens"
"$engine" compare --model "$model" --file "$text" --kv f16,int8,int4 --chunks 2 --context 2048
step "done"
