#!/usr/bin/env bash
# run.sh [--quick] [--docs] [--model FILE] - the evaluation of a compressed cache on the small
# vision-language model: builds the engine, runs all experiments, prints their tables, and writes
# results.csv, evaluation.json and figures into build/vlm. With --quick only the two tables, with 300
# questions; with --docs the figures and evaluation.json go to docs too. Under twenty minutes on two
# cores, under two with --quick.
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/script.sh

out=build/vlm
model=examples/vlm/model.gguf
engine=build/release/bin/kvc-engine
experiments=all
questions=1000
docs=
while [ $# -gt 0 ]; do
    case $1 in
    --quick)
        experiments=first,second
        questions=300
        ;;
    --docs) docs=docs ;;
    --model)
        model=${2:?--model needs a file}
        shift
        ;;
    *)
        sed -n '2,6s/^# //p' "$0" >&2
        exit 2
        ;;
    esac
    shift
done

# overlay NAME SEED KIND OPTIONS...: a picture with what is left of its patches.
overlay()
{
    local name=$1 seed=$2 kind=$3

    shift 3
    "$engine" vqa --model "$model" --picture "$seed" --kind "$kind" "$@" --overlay "$out/new.png"
    mv "$out/new.png" "$out/$name.png"
}

step "packages"
need_packages gcc libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev \
    gnuplot-nox fonts-dejavu-core
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-engine
mkdir -p "$out"
step "examination: $experiments, $questions questions"
"$engine" exam --model "$model" --experiments "$experiments" --questions "$questions" \
    --csv "$out/results.csv.new" >/dev/null
mv "$out/results.csv.new" "$out/results.csv"
into "$out/evaluation.json" "$engine" exam --read "$out/results.csv" --json
"$engine" exam --read "$out/results.csv"
step "figures"
examples/vlm/plots.sh "$out/results.csv" "$out"
for kind in scene screen; do
    overlay "${kind}_prune50" 7 "$kind" --rate 50
    overlay "${kind}_extreme" 7 "$kind" --profile extreme
done
if [ -n "$docs" ]; then
    step "to $docs"
    mkdir -p docs/evaluation
    into docs/evaluation.json cat "$out/evaluation.json"
    into docs/evaluation/results.csv cat "$out/results.csv"
    for figure in "$out"/*.png; do
        into "docs/evaluation/${figure##*/}" cat "$figure"
    done
fi
step "done: results.csv, evaluation.json and figures are in $out"
