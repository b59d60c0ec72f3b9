#!/usr/bin/env python3
"""tables.py FOLDER [--documents FILE...]: the JSON of kvc-bench in FOLDER as CSV files there, or as the tables of
documents, each between a line <!-- table NAME --> and a line <!-- end -->."""
import argparse
import csv
import json
import pathlib
import re
import sys

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--documents", type=pathlib.Path, nargs="+")
arguments = parser.parse_args()


def load(name):
    file = arguments.folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


NAMES = ("append", "tables", "attend", "small", "keep", "scores", "prefill", "rows", "peer")
runs = {name: run for name in NAMES if (run := load(name))}
KEY = ("heads", "kv_heads", "n_kv", "format")


def machine():
    """The best of what the commands found: other programs only take away."""
    best = {}
    for run in runs.values():
        for peak in run.get("machine", []):
            seen = best.setdefault(peak["threads"], dict(peak))
            for name, value in peak.items():
                seen[name] = max(seen[name], value)
    return [best[threads] for threads in sorted(best)]


def roofline():
    for row in runs["attend"]["rows"]:
        if row["n_kv"] == 32768:
            yield {"work": "decode", "threads": row["threads"], "format": row["format"],
                   "heads": f"{row['heads']}/{row['kv_heads']}", "rows": 1,
                   "ops_per_byte": round(1e3 * row["gflops"] * row["us"] / row["bytes"], 3),
                   "gflops": row["gflops"]}
    for row in runs["prefill"]["rows"]:
        if row["n_kv"] == 4096:
            yield {"work": "prefill", "threads": row["threads"], "format": row["format"],
                   "heads": f"{row['heads']}/{row['kv_heads']}", "rows": row["rows"],
                   "ops_per_byte": round(1e3 * row["gflops"] * row["us"] / row["bytes"], 3),
                   "gflops": row["gflops"]}


def write_csv(name, rows):
    rows = list(rows)
    with open(arguments.folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def key(row, *more):
    return tuple(row[name] for name in KEY + more)


def by_threads(rows, value, *more):
    """Rows that differ in threads only: [(the first, [value of each])]."""
    groups = {}
    for row in rows:
        groups.setdefault(key(row, *more), []).append(row)
    return [(group[0], [value(row) for row in group]) for group in groups.values()]


def heads(row):
    return f"{row['heads']}/{row['kv_heads']}"


def percent(share, digits=0):
    return f"{100 * share:.{digits}f} %"


def milliseconds(row, name="us"):
    time = row[name] / 1000
    return f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def table_machine():
    yield ["threads", "read GB/s", "small pages", "huge pages", "prefetched", "copy GB/s", "FMA GFLOP/s", "VNNI GOP/s"]
    for p in machine():
        yield [p["threads"], f"{p['read_gbps']:.1f}", f"{p['read_small_gbps']:.1f}", f"{p['read_huge_gbps']:.1f}",
               f"{p['read_prefetch_gbps']:.1f}", f"{p['copy_gbps']:.1f}", f"{p['fma_gflops']:.0f}", f"{p['vnni_gops']:.0f}"]


def table_attend():
    rows = runs["attend"]["rows"]
    threads = sorted({row["threads"] for row in rows})
    yield (["heads", "tokens", "format", "MB"] + [f"ms, {n}" for n in threads] + [f"of read, {n}" for n in threads] +
           [f"of FMA, {n}" for n in threads])
    for row, cells in by_threads(rows, lambda r: (milliseconds(r), percent(r["read_share"]), percent(r["fma_share"]))):
        yield [heads(row), row["n_kv"], row["format"], f"{row['bytes'] / 1e6:.1f}"] + [c[i] for i in range(3) for c in cells]


def table_tables():
    rows = runs["tables"]["rows"]
    names = list(dict.fromkeys(row["table"] for row in rows))
    yield ["format", "threads"] + [f"ms, {name}" for name in names]
    for form in dict.fromkeys(row["format"] for row in rows):
        for threads in sorted({row["threads"] for row in rows}):
            same = {r["table"]: r for r in rows if r["format"] == form and r["threads"] == threads}
            yield [form, threads] + [milliseconds(same[name]) for name in names]


def table_small():
    rows = runs["small"]["rows"]
    huge = {key(row, "threads"): row for row in runs["attend"]["rows"]}
    yield ["heads", "format", "threads", "ms, small pages", "ms, huge pages"]
    for row in rows:
        yield [heads(row), row["format"], row["threads"], milliseconds(row), milliseconds(huge[key(row, "threads")])]


def table_keep():
    rows = runs["keep"]["rows"]
    whole = {key(row, "threads"): row for row in rows if row["state"] == "whole"}
    states = list(dict.fromkeys((row["state"], row["block"]) for row in rows if row["state"] != "whole"))
    yield ["format", "threads", "ms, whole"] + [f"{state}, {block}" for state, block in states]
    for at, base in whole.items():
        same = {(r["state"], r["block"]): r for r in rows if key(r, "threads") == at}
        yield [base["format"], base["threads"], milliseconds(base)] + [f"{same[s]['us'] / base['us']:.2f}" for s in states]


def table_scores():
    rows = runs["scores"]["rows"]
    plain = {key(row, "threads"): row for row in rows if row["scores"] == "none"}
    yield ["tokens", "format", "threads", "ms, none", "page", "token"]
    for at, base in plain.items():
        same = {r["scores"]: r for r in rows if key(r, "threads") == at}
        yield [base["n_kv"], base["format"], base["threads"], milliseconds(base)] + \
            [f"{100 * (same[s]['us'] / base['us'] - 1):+.1f} %" for s in ("page", "token")]


def table_prefill():
    rows = runs["prefill"]["rows"]
    threads = sorted({row["threads"] for row in rows})
    yield (["tokens", "rows", "format"] + [f"ms, {n}" for n in threads] + [f"GFLOP/s, {n}" for n in threads] +
           [f"of FMA, {n}" for n in threads])
    for row, cells in by_threads(rows, lambda r: (milliseconds(r), f"{r['gflops']:.0f}", percent(r["fma_share"])), "rows"):
        yield [row["n_kv"], row["rows"], row["format"]] + [c[i] for i in range(3) for c in cells]


def table_append():
    yield ["heads", "format", "transforms", "threads", "append us", "seal us", "seal GB/s", "of copy", "attention us", "append + seal of it"]
    for r in runs["append"]["rows"]:
        yield [heads(r), r["format"], "yes" if r["transforms"] else "no", r["threads"], f"{r['append_us']:.2f}",
               f"{r['seal_us']:.2f}", f"{r['seal_gbps']:.1f}", percent(r["copy_share"]), f"{r['attend_us']:.0f}",
               percent(r["attend_share"], 2)]


def table_rows():
    rows = runs["rows"]["rows"]
    threads = sorted({row["threads"] for row in rows})
    yield ["heads", "format", "MB"] + [f"{what}, {n}" for what in ("ms", "GB/s", "of read") for n in threads]
    for row, cells in by_threads(rows, lambda r: (milliseconds(r), f"{r['gbps']:.1f}", percent(r["read_share"]))):
        yield [heads(row), row["format"], f"{row['bytes'] / 1e6:.1f}"] + [c[i] for i in range(3) for c in cells]


def table_decode():
    rows = [row for row in runs["attend"]["rows"] if row["n_kv"] == 32768]
    formats = ("f16", "int8", "int4")
    yield ["query / KV heads", "threads"] + [name.upper() for name in formats]
    for place in dict.fromkeys((row["heads"], row["kv_heads"], row["threads"]) for row in rows):
        same = {r["format"]: r for r in rows if (r["heads"], r["kv_heads"], r["threads"]) == place}
        yield [f"{place[0]} / {place[1]}", place[2]] + [milliseconds(same[name]) for name in formats]


def table_peer():
    yield ["heads", "tokens", "format", "threads", "ggml's layout", "ms", "ggml ms", "ratio", "middle half"]
    for r in runs["peer"]["rows"]:
        yield [heads(r), r["n_kv"], r["format"], r["threads"], r["layout"], milliseconds(r, "ours_us"),
               milliseconds(r, "ggml_us"), f"{r['ratio']:.2f}", f"{r['ratio_low']:.2f} to {r['ratio_high']:.2f}"]


def markdown(lines):
    lines = [list(map(str, line)) for line in lines]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- |", "|---|").replace(" --- |", "---|")


def renew(match):
    name = match[1]
    if name != "machine" and {"decode": "attend"}.get(name, name) not in runs:
        return match[0]  # not measured now: what was there stays
    return f"<!-- table {name} -->\n{markdown(globals()['table_' + name]())}<!-- end -->"


if arguments.documents:
    for document in arguments.documents:
        text = document.read_text(encoding="utf-8")
        text = re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", renew, text, flags=re.S)
        document.write_text(text, encoding="utf-8")
    sys.exit()
write_csv("machine", machine())
write_csv("roofline", roofline())
for NAME, RUN in runs.items():
    write_csv(NAME, RUN["rows"])
