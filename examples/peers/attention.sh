#!/usr/bin/env bash
# attention.sh [OPTION]... - decode attention beside that of ggml, the library of llama.cpp, on the same values,
# in turn: installs llama-cpp-python from PyPI into build/peers-venv, which takes four minutes on two cores,
# builds kvc-bench with its ggml, prints a table, and writes build/peers/attention.json. The options are those
# of kvc-bench peer; without any it takes three minutes more.
set -euo pipefail
cd "$(dirname "$0")/../.."
. examples/script.sh

out=build/peers
venv=build/peers-venv
version=0.3.36

case ${1:-} in
--help | -h)
    sed -n '2,5s/^# //p' "$0"
    exit 0
    ;;
esac
step "packages"
need_packages gcc g++ libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev libpng-dev \
    python3 python3-dev python3-venv ca-certificates
step "ggml"
mkdir -p "$out"
if [ ! -x "$venv/bin/pip" ]; then
    python3 -m venv "$venv"
fi
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2}
export CMAKE_ARGS="-DLLAMA_BUILD_COMMON=OFF -DMTMD_BUILD=OFF"
"$venv/bin/pip" install --quiet --disable-pip-version-check "llama-cpp-python==$version"
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-bench
step "attention"
into "$out/attention.json" build/release/bin/kvc-bench peer "$@" --json
python3 - "$out/attention.json" <<'EOF'
import json, sys
print("heads  kv heads    n_kv  format  threads  ggml's layout   ours us   ggml us   ratio  middle half")
for r in json.load(open(sys.argv[1]))["rows"]:
    print(f"{r['heads']:5}  {r['kv_heads']:8}  {r['n_kv']:6}  {r['format']:6}  {r['threads']:7}  "
          f"{r['layout']:13}  {r['ours_us']:8.0f}  {r['ggml_us']:8.0f}  {r['ratio']:6.2f}  "
          f"{r['ratio_low']:.2f}-{r['ratio_high']:.2f}")
EOF
step "done: all rows are in $out/attention.json"
