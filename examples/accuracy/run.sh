#!/usr/bin/env bash
# run.sh [--quick] [--docs] - what each bit costs: builds the engine, calibrates two models, scores the
# recipes of the cache on two kinds of text, and writes results.csv and figures into build/accuracy. With
# --quick a chunk of each; with --docs the figures and results.csv go to docs too. Where there are results
# of examples/peers/run.sh, they are drawn beside. About an hour and a half on two cores, a quarter of one with
# --quick.
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/script.sh

out=build/accuracy
engine=build/release/bin/kvc-engine
models=build/models
smollm2=$models/SmolLM2-135M-Instruct.Q4_1.gguf
gemma=$models/gemma-3-270m-q4_k_m.gguf
many=10 some=3 few=1
docs=
while [ $# -gt 0 ]; do
    case $1 in
    --quick) many=1 some=1 few=1 ;;
    --docs) docs=docs/accuracy ;;
    *)
        sed -n '2,7s/^# //p' "$0" >&2
        exit 2
        ;;
    esac
    shift
done

# score NAME MODEL TEXT CHUNKS RECIPES OPTIONS...: a table, and its rows in a file of their own; once.
score()
{
    local csv=$out/$1.csv model=$2 text=$3 chunks=$4 recipes=$5

    shift 5
    [ -f "$csv" ] && return
    step "$csv"
    "$engine" compare --model "$model" --file "$models/$text.txt" --chunks "$chunks" --recent 0 \
        --kv "$recipes" --csv "$csv.new" "$@"
    mv "$csv.new" "$csv"
}

step "packages"
need_packages gcc libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev gnuplot-nox
step "models and texts"
examples/fetch_models.sh gemma
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-engine
mkdir -p "$out"

for name in smollm2 gemma; do
    model=${!name}
    step "$name: calibration"
    "$engine" calibrate --model "$model" --file "$models/calibration.txt"
    presets=int8,k6v4,int4,int4:r128,int4-raw,k8v4
    score "$name-text" "$model" text "$many" "$presets"
    score "$name-prose" "$model" prose "$some" "$presets"
    steps=int4,int4:-mean,int4:-scale,int4:-hk,int4:-hv,int4:plain,int4:online,int4:s0
    steps=$steps,int8:plain,k6v4:plain,int4:head,int8:head,int8:imm,k6v4:imm,int4:imm
    score "$name-steps-text" "$model" text "$few" "$steps"
    score "$name-steps-prose" "$model" prose "$few" "$steps"
    article=int8:global,int8:perhead,int8:window,int4:global,int4:perhead,int4:window
    score "$name-article" "$model" text "$few" "$article"
    score "$name-long" "$model" text 1 int8,k6v4,int4,int4:r128,int4:plain,int4:imm --context 8192 \
        --score-from 64 --bucket 1024
    if [ ! -f "$out/$name-heads.csv" ]; then
        step "$name: sensitivity of layers and heads"
        "$engine" sensitivity --model "$model" --file "$models/text.txt" --chunks "$some" \
            --csv "$out/$name-heads.csv.new" | tee "$out/$name-heads.txt"
        mv "$out/$name-heads.csv.new" "$out/$name-heads.csv"
    fi
done

step "figures"
{
    head -n 1 "$out/smollm2-text.csv" | sed 's/^/run,/'
    for file in "$out"/*-{text,prose,article,long}.csv; do
        run=$(basename "$file" .csv)
        tail -n +2 "$file" | sed "s/^/$run,/"
    done
} >"$out/results.new"
mv "$out/results.new" "$out/results.csv"
examples/accuracy/plots.sh "$out/results.csv" "$out" build/peers/results.csv
if [ -n "$docs" ]; then
    mkdir -p "$docs"
    cp "$out"/results.csv "$out"/*-heads.csv "$out"/*.png "$docs"
fi
step "done: $out/results.csv and $out/*.png"
