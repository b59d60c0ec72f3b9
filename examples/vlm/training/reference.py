"""Prints what test_vlm.c compares the C engine with: logits of the torch model, from the weights in
the GGUF file, behind the questions of some lessons."""
import argparse
import ctypes

import gguf
import torch

from lessons import Lesson, Lessons
from model import Shape, Vlm

N_TOKENS = 48
CASES = ((24, 1, 70001), (16, 2, 70002))  # grid, images, lesson


def load(path):
    tensors = {t.name: torch.from_numpy(t.data.copy()).float() for t in gguf.GGUFReader(path).tensors}
    model = Vlm()
    state = model.state_dict()

    def put(name, *sources):
        whole = torch.cat([tensors[s] for s in sources])
        if name.startswith("stem.convs") and name.endswith("weight"):
            whole = whole.view(Shape.width, 3, 3, Shape.width).permute(0, 3, 1, 2)
        assert state[name].shape == whole.shape, name
        state[name] = whole

    for ours, theirs in (("patch", "patch_embd"), ("mix", "patch_mix"), ("colour", "colour_embd"),
                         ("out", "proj")):
        for part in ("weight", "bias"):
            put("stem.%s.%s" % (ours, part), "v.%s.%s" % (theirs, part))
    for i in range(len(Shape.dilations)):
        put("stem.norms.%d" % i, "v.blk.%d.norm.weight" % i)
        for ours, theirs in (("convs", "conv"), ("points", "point")):
            for part in ("weight", "bias"):
                put("stem.%s.%d.%s" % (ours, i, part), "v.blk.%d.%s.%s" % (i, theirs, part))
    put("stem.norm", "v.norm.weight")
    put("embedding.weight", "token_embd.weight")
    for i in range(Shape.n_layers):
        for ours, theirs in (("norm1", ["attn_norm"]), ("norm2", ["ffn_norm"]),
                             ("qkv.weight", ["attn_q", "attn_k", "attn_v"]),
                             ("o.weight", ["attn_output"]),
                             ("gate_up.weight", ["ffn_gate", "ffn_up"]),
                             ("down.weight", ["ffn_down"])):
            put("blocks.%d.%s" % (i, ours), *("blk.%d.%s.weight" % (i, t) for t in theirs))
    put("norm", "output_norm.weight")
    put("head.weight", "output.weight")
    model.load_state_dict(state)
    return model


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lessons", required=True, help="the shared library vlm_lesson")
    p.add_argument("--model", required=True, help="GGUF file")
    a = p.parse_args()
    lessons, model = Lessons(a.lessons), load(a.model)
    print("/* training/reference.py: grid, images, lesson, image, token, logits that follow it */")
    for grid, n, seed in CASES:
        lesson = Lesson(lessons.defaults(grid), n, N_TOKENS, (ctypes.c_int32 * 4)(0, 1, 0, 1), 1.3, 0.3)
        d = lessons.batch([seed], lesson)
        with torch.no_grad():
            logits = model(d["rgb"], d["tokens"])[0].view(n, N_TOKENS, -1)
        for image in range(n):
            asked = (d["tokens"][0, image] == 4).nonzero()[:, 0]  # question marks
            for token in asked[:3].tolist() if n > 1 else asked[:5].tolist():
                print("{%d, %d, %d, %d, %d, {%s}}," % (grid, n, seed, image, token, ", ".join(
                    "%.5ff" % x for x in logits[image, token].tolist())))


main()
