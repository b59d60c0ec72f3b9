#!/usr/bin/env bash
# plot.sh FOLDER - draws FOLDER/roofline.png from machine.csv and roofline.csv there: how many operations a
# second attention does, against how many it has for each byte that it reads.
set -euo pipefail

dir=$1
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT

# peak THREADS COLUMN: of the machine.
peak()
{
    awk -F, -v n="$1" -v name="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        $at["threads"] == n { print $at[name]; exit }' "$dir/machine.csv"
}

# pick THREADS WORK [FORMAT]: rows "operations-a-byte gflops label".
pick()
{
    awk -F, -v n="$1" -v work="$2" -v format="${3:-}" '
        NR > 1 && $1 == work && $2 == n && (format == "" || $3 == format) {
            printf "%s %s \"%s\"\n", $6, $7, work == "decode" ? $4 : $5 " rows" }' "$dir/roofline.csv"
}

cat >"$data/plot" <<EOF
set terminal pngcairo noenhanced size 1200,600 font 'sans,10'
set logscale xy
set format y '%g'
set grid
set output '$dir/roofline.new'
set multiplot layout 1,2
set key bottom right Left reverse
set xlabel 'operations for each byte of K and V, read once'
set ylabel '10^9 operations a second'
set xrange [0.7:20000]
set yrange [5:4000]
EOF
for n in 1 2; do
    for format in f16 int8 int4; do
        pick $n decode $format >"$data/decode.$n.$format"
        pick $n prefill $format >"$data/prefill.$n.$format"
    done
    read=$(peak $n read_gbps) fma=$(peak $n fma_gflops) vnni=$(peak $n vnni_gops)
    cat >>"$data/plot" <<EOF
set title '$n thread$([ $n = 1 ] || echo s)'
min(a, b) = a < b ? a : b
plot min($read * x, $fma) with lines lw 2 lc rgb '#444444' title 'memory and FMA of this machine', \\
    $vnni > 0 ? min($read * x, $vnni) : NaN with lines dt 2 lc rgb '#999999' title 'memory and VNNI', \\
    '$data/decode.$n.f16' using 1:2 with points pt 7 ps 1.4 lc rgb '#7a7a7a' title 'F16: decode', \\
    '$data/decode.$n.int8' using 1:2 with points pt 7 ps 1.4 lc rgb '#1b6ca8' title 'INT8: decode', \\
    '$data/decode.$n.int4' using 1:2 with points pt 7 ps 1.4 lc rgb '#c1440e' title 'INT4: decode', \\
    '$data/prefill.$n.f16' using 1:2 with points pt 9 ps 1.4 lc rgb '#7a7a7a' title 'F16: prefill', \\
    '$data/prefill.$n.int8' using 1:2 with points pt 9 ps 1.4 lc rgb '#1b6ca8' title 'INT8: prefill', \\
    '$data/prefill.$n.int4' using 1:2 with points pt 9 ps 1.4 lc rgb '#c1440e' title 'INT4: prefill', \\
    for [format in "f16 int8 int4"] '$data/decode.$n.'.format using 1:2:3 \\
        with labels left offset 0.9,-0.5 font ',8' tc rgb '#444444' notitle
EOF
done
gnuplot "$data/plot" 2>"$data/errors" || { cat "$data/errors" >&2; exit 1; }
mv "$dir/roofline.new" "$dir/roofline.png"
