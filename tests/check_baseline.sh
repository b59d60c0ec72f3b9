#!/usr/bin/env bash
# Usage: check_baseline.sh OBJECT... - known fault I2: the objects outside kernels/simd use no AVX
# register and no VEX or EVEX instruction; those inside define kernels of their own table only, and
# the AVX2 one has no AVX-512.
set -euo pipefail

vex='%[yz]mm|%k[0-7]|\s(v[a-z0-9]+|andn|bextr|blsi|blsmsk|blsr|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)[lq]?\s'
evex='%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]'
n_simd=0 n_base=0

# forbid OBJECT PATTERN: fails and shows the first instructions that fit.
forbid()
{
    if objdump -d --no-show-raw-insn "$1" | grep -E -m 5 "$2"; then
        echo "$1: instructions beyond its CPU (above)"
        exit 1
    fi
}

for object; do
    case $object in
    */kernels/simd/*)
        table=$(basename "$object" | cut -d. -f1)
        n_simd=$((n_simd + 1))
        if nm -g --defined-only "$object" | awk '{print $3}' | grep -v "_$table\$"; then
            echo "$object: defines more than kernels of $table (above)"
            exit 1
        fi
        [ "$table" != avx2 ] || forbid "$object" "$evex"
        ;;
    *)
        n_base=$((n_base + 1))
        forbid "$object" "$vex"
        ;;
    esac
done
if [ "$n_simd" -eq 0 ] || [ "$n_base" -eq 0 ]; then
    echo "objects missing"
    exit 1
fi
