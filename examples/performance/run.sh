#!/usr/bin/env bash
# run.sh [--quick] [--docs] - how fast the cache is on this machine: builds kvc-bench, runs its commands, and
# writes tables (CSV) and the roofline into build/performance. With --quick every row is shorter; with --docs
# they go to docs/performance too, and the tables of the documents are renewed. Where
# examples/peers/attention.sh has installed ggml, it runs beside. Ten minutes on two cores, six with --quick.
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/script.sh

out=build/performance
bench=build/release/bin/kvc-bench
seconds=0.3
docs=
while [ $# -gt 0 ]; do
    case $1 in
    --quick) seconds=0.05 ;;
    --docs) docs=yes ;;
    *)
        sed -n '2,5s/^# //p' "$0" >&2
        exit 2
        ;;
    esac
    shift
done

# measure NAME COMMAND OPTIONS...: the JSON of a command; the file appears when it has ended well.
measure()
{
    local file=$out/$1.json

    step "$*"
    shift
    into "$file" "$bench" "$@" --seconds "$seconds" --json
}

step "packages"
need_packages gcc g++ libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev python3 \
    gnuplot-nox
step "build"
cmake --preset release >/dev/null
cmake --build --preset release --target kvc-bench
mkdir -p "$out"
rm -f "$out"/*.json

measure append append --heads 32/8,32/32
best=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["rows"][0]["table"])' "$out/append.json")
# From cache to cache, then from memory. The reference takes seconds a step there.
measure tables attend --n-kv 4096 --heads 32/8 --formats f16,int8,int4
measure attend attend --n-kv 4096,16384,32768 --formats f16,int8,int4,k6v4 --tables "$best"
measure small attend --n-kv 32768 --formats f16,int8,int4 --tables "$best" --small-pages
measure keep attend --n-kv 32768 --heads 32/8 --formats f16,int8,int4 --tables "$best" --keep 0.5
measure scores attend --n-kv 4096,32768 --heads 32/8 --formats f16,int8,int4 --tables "$best" \
    --scores none,page,token
measure prefill prefill --n-kv 4096,16384 --rows 64,512,2048
measure rows rows
if "$bench" peer --n-kv 256 --formats f16 --seconds 0 >/dev/null 2>&1; then
    measure peer peer
fi
step "tables and figures"
python3 examples/performance/tables.py "$out"
examples/performance/plot.sh "$out"
if [ -n "$docs" ]; then
    cp "$out"/*.csv "$out/roofline.png" docs/performance/
    python3 examples/performance/tables.py "$out" --documents docs/performance.md docs/attend.md README.md
fi
step "done: see $out"
