#!/usr/bin/env bash
# recipe.sh - trains the small vision-language model anew, on two cores in about three quarters of an hour, and writes
# ../model.gguf. Steps are counted, not timed; lessons are numbered by the seeds. Needs torch 2.11, numpy and gguf
# (PYTHON names the interpreter) and the build of the target vlm_lesson.
set -euo pipefail
cd "$(dirname "$0")/../../.."
. examples/script.sh

work=build/training
python=${PYTHON:-python3}
need_packages gcc libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target vlm_lesson
mkdir -p "$work"
lessons=$(find build/release -name 'libvlm_lesson.so' | head -1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

# train OUT OPTIONS...: one stage
train()
{
    local out=$1
    shift
    "$python" examples/vlm/training/train.py --lessons "$(realpath "$lessons")" --log "$work/log.txt" --out "$work/$out" "$@"
}

rm -f "$work/log.txt"
# the stem alone learns what lies on a patch: no attention, so it is cheap
train stem.pt --steps 400 --seed 1 --stem-only --batch 12 --grids 12 --rate 3e-3
# small pictures: the decoder learns to look things up
train small.pt --init "$work/stem.pt" --steps 1200 --seed 2 --batch 4 --grids 12 --tokens 100 --rate 2e-3 --rate-end .5 \
    --ground .3 --ground-end 1.5
train lookup.pt --init "$work/small.pt" --steps 450 --seed 4 --batch 4 --grids 12 --tokens 100 --rate 1.5e-3 --rate-end .7 \
    --dense .1 --ground .3 --ground-end 3
# pictures of 336 and 224 pixels, dialogues of two; the grounding ends
train final.pt --init "$work/lookup.pt" --steps 2000 --seed 3 --batch 4 --grids 24,24,16,12 --two .2 --tokens 80 \
    --rate 1.5e-3 --rate-end .03 --dense .1 --places .1 --ground .15 --ground-end .6
"$python" examples/vlm/training/export.py --model "$work/final.pt" --out examples/vlm/model.gguf \
    --about "recipe: examples/vlm/training/recipe.sh, seeds 1 to 4; drawn pictures only"
cp "$work/log.txt" examples/vlm/training/log.txt
"$python" examples/vlm/training/reference.py --lessons "$(realpath "$lessons")" --model examples/vlm/model.gguf \
    >tests/data/vlm_reference.inc
