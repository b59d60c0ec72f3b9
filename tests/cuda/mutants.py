#!/usr/bin/env python3
"""mutants.py BUILD [--part I/N] [--write FILE] [--known FILE]: breaks the CUDA kernels one by one and sees whether their tests
notice. BUILD is the folder of a preset that has built them for the emulator. Each mutant of mutants.json is a
piece of a kernel's text that becomes another one; the kernels are compiled with it and the tests that it names run
with seeds 1, 2 and 3 until one fails. Exit status 1 if all pass (it survives). --part takes every N-th mutant from
I on; --write keeps what was found, as {"mutants": [{"name", "file", "caught", "by"}]}; --known sees that such a file
has all mutants there are."""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build", type=pathlib.Path)
parser.add_argument("--part", default="0/1")
parser.add_argument("--name", help="only this one")
parser.add_argument("--write", type=pathlib.Path)
parser.add_argument("--known", type=pathlib.Path)
arguments = parser.parse_args()

here = pathlib.Path(__file__).resolve().parent
root = here.parent.parent
seeds = ("1", "2", "3")
seconds = 300
compiler = os.environ.get("CXX", "g++")
flags = ["-std=c++17", "-O1", "-DKVC_EMU", "-ffp-contract=off", "-fno-strict-aliasing", "-w",
         f"-I{root}/tests/emu", f"-I{root}/src", f"-I{root}/include"]


def users(file):
    """The kernels that a header is part of, or the kernel itself."""
    if file.suffix == ".cu":
        return [file]
    found, names = set(), {file.name}
    while True:
        more = {other for other in (root / "cuda").iterdir()
                if any(f'#include "{name}"' in other.read_text(encoding="utf-8") for name in names)}
        if more <= found:
            return sorted(other for other in found if other.suffix == ".cu")
        found |= more
        names |= {other.name for other in more}


def archive(name):
    (path,) = arguments.build.rglob(f"lib{name}.a")
    return str(path)


def objects(test):
    """What the test itself was linked from."""
    folder = arguments.build / "tests/cuda/CMakeFiles" / f"cuda_{test}.dir"
    found = sorted(str(path) for path in folder.rglob("*.o"))
    if not found:
        sys.exit(f"mutants.py: {folder} has no objects: build the tests first")
    return found


def run(command, **more):
    return subprocess.run(command, check=False, capture_output=True, text=True, **more)


def complaint(result):
    """What a failed test says, in a line."""
    lines = (result.stderr + result.stdout).splitlines()
    for mark in ("emulator: ", "[  FAILED  ] "):
        for line in lines:
            if mark in line and "test(s)" not in line:
                return line.split(mark)[1].strip()
    return f"exit status {result.returncode}"


def mutate(mutant, folder):
    """A copy of the kernels with the mutant; the files that it changes."""
    shutil.copytree(root / "cuda", folder / "cuda")
    file = folder / "cuda" / mutant["file"]
    text = file.read_text(encoding="utf-8")
    if text.count(mutant["old"]) != mutant.get("times", 1):
        sys.exit(f"mutants.py: {mutant['name']}: its text is {text.count(mutant['old'])} times in {file.name}")
    file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    return [folder / "cuda" / user.name for user in users(root / "cuda" / mutant["file"])]


def examine(mutant):
    """Who catches a mutant; None: nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        mutated = []
        for file in mutate(mutant, folder):
            mutated.append(str(folder / (file.stem + ".o")))
            result = run([compiler, *flags, f"-I{folder}/cuda", "-x", "c++", "-c", str(file), "-o", mutated[-1]])
            if result.returncode != 0:
                sys.exit(f"mutants.py: {mutant['name']} does not compile:\n{result.stderr}")
        for test in mutant["tests"]:
            program = str(folder / test)
            result = run([compiler, *objects(test), *mutated, archive("kvc_cuda_emu"), archive("kvc_emu"),
                          archive("kvc_cuda_ref"), "-lcmocka", "-lm", "-o", program])
            if result.returncode != 0:
                sys.exit(f"mutants.py: {mutant['name']} does not link:\n{result.stderr}")
            for seed in seeds:
                environment = dict(os.environ, KVC_EMU_SEED=seed)
                try:
                    result = run([program], env=environment, timeout=seconds)
                except subprocess.TimeoutExpired:
                    return f"{test}: no end in {seconds} s"
                if result.returncode != 0:
                    return f"{test}: {complaint(result)}".replace(f"{folder}/", "")
    return None


part, of = (int(number) for number in arguments.part.split("/"))
mutants = json.loads((here / "mutants.json").read_text(encoding="utf-8"))
if arguments.known:
    known = json.loads(arguments.known.read_text(encoding="utf-8"))["mutants"]
    if [m["name"] for m in known] != [m["name"] for m in mutants]:
        sys.exit(f"mutants.py: {arguments.known} is not of these mutants: write it again")
chosen = [m for i, m in enumerate(mutants) if (m["name"] == arguments.name if arguments.name else i % of == part)]
report = []
for mutant in chosen:
    by = examine(mutant)
    print(f"{'caught  ' if by else 'SURVIVES'} {mutant['file']}: {mutant['name']}{': ' + by if by else ''}", flush=True)
    report.append({"name": mutant["name"], "file": f"cuda/{mutant['file']}", "caught": by is not None, "by": by or ""})
if arguments.write:
    arguments.write.write_text(json.dumps({"mutants": report}, indent=1) + "\n", encoding="utf-8")
survivors = sum(not m["caught"] for m in report)
print(f"{len(report)} mutants, {survivors} survive")
sys.exit(1 if survivors or not report else 0)
