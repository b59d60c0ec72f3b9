#!/usr/bin/env bash
# run.sh [--quick] - how other quantizers of the KV cache do on the texts that kvc-engine compare reads:
# installs llama.cpp and OpenVINO from PyPI into build/peers-venv, runs peers.py, and writes
# build/peers/results.csv. Building llama.cpp takes ten minutes, once, and the runs two hours on two cores;
# with --quick a quarter of an hour, a chunk of each text and no long one.
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/script.sh

out=build/peers
venv=build/peers-venv
models=build/models
engine=build/release/bin/kvc-engine
smollm2=SmolLM2-135M-Instruct.Q4_1.gguf
gemma="gemma-3-270m-q4_k_m.gguf"
chunks=10
prose_chunks=4
quick=
while [ $# -gt 0 ]; do
    case $1 in
    --quick)
        quick=yes
        chunks=1
        prose_chunks=1
        ;;
    *)
        sed -n '2,5s/^# //p' "$0" >&2
        exit 2
        ;;
    esac
    shift
done

# measure NAME MODEL TEXT OPTIONS...: rows of the result, in a file of their own.
measure()
{
    local name=$1 model=$2 text=$3 tokens=$out/$2.$3.json

    shift 3
    step "$name: $model, $text${*:+, $*}"
    into "$tokens" "$engine" tokens --model "$models/$model" --file "$models/$text" --json
    into "$out/$name.csv" "$venv/bin/python" examples/peers/peers.py "$models/$model" \
        "$models/$text" --tokens "$tokens" --csv "$@"
    parts+=("$out/$name.csv")
}

step "packages"
need_packages gcc g++ libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev \
    python3 python3-dev python3-venv ca-certificates bsdextrautils
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-engine
step "llama.cpp and OpenVINO"
mkdir -p "$out"
if [ ! -x "$venv/bin/pip" ]; then
    python3 -m venv "$venv"
fi
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2}
export CMAKE_ARGS="-DLLAMA_BUILD_COMMON=OFF -DMTMD_BUILD=OFF"
"$venv/bin/pip" install --quiet --disable-pip-version-check numpy llama-cpp-python==0.3.36 \
    openvino==2026.4.1 openvino-genai==2026.4.1.0
step "models and texts"
examples/fetch_models.sh gemma

export TMPDIR=$PWD/$out # copies of the models with their weights as fp32
parts=()
measure smollm2_text "$smollm2" text.txt --chunks "$chunks"
measure smollm2_prose "$smollm2" prose.txt --chunks "$prose_chunks"
measure gemma_text "$gemma" text.txt --chunks "$chunks"
measure gemma_prose "$gemma" prose.txt --chunks "$prose_chunks"
measure openvino_text "$smollm2" text.txt --peer openvino --chunks "$chunks"
measure openvino_prose "$smollm2" prose.txt --peer openvino --chunks "$prose_chunks"
if [ -z "$quick" ]; then
    measure smollm2_file "$smollm2" text.txt --chunks "$chunks" --weights file
    measure smollm2_long "$smollm2" text.txt --chunks 1 --context 8192 --first 0 --bucket 1024
fi
into "$out/results.csv" awk 'FNR > 1 || NR == 1' "${parts[@]}"
awk -F, -v OFS=, '$11 == "all" || NR == 1 { print $1, $2, $14, $3, $4, $5, $6, $7, $8, $9, $10 }' \
    "$out/results.csv" | sed 's/,,/, ,/g' | column -s, -t
step "done: all rows are in $out/results.csv"
