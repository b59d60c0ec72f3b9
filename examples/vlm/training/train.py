"""Trains the small vision-language model, one stage a call; recipe.sh has the stages."""
import argparse
import ctypes
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

from lessons import Lesson, Lessons
from model import Vlm

KINDS = ("color", "shape", "count", "spatial", "read")


def arguments():
    p = argparse.ArgumentParser()
    add = p.add_argument
    add("--lessons", required=True, help="the shared library vlm_lesson")
    add("--out", required=True)
    add("--init")
    add("--log", default="/dev/null")
    add("--steps", type=int, required=True)
    add("--seed", type=int, required=True, help="lessons are numbered from seed * 2^32 on")
    add("--stem-only", action="store_true", help="only the dense labels")
    add("--batch", type=int, default=4)
    add("--grids", default="24", help="drawn from, as in 24,24,16")
    add("--two", type=float, default=0.0, help="share of steps with dialogues of two images")
    add("--tokens", type=int, default=80)
    add("--rate", type=float, default=2e-3)
    add("--rate-end", type=float, default=0.05)
    add("--warm", type=int, default=30)
    add("--dense", type=float, default=0.15, help="weight of the dense labels")
    add("--places", type=float, default=0.2, help="weight of the places")
    add("--ground", type=float, default=0.3, help="weight of the grounding, down to 0 at:")
    add("--ground-end", type=float, default=0.6)
    return p.parse_args()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (K. Jordan, 2024), in float32: torch's own works in bfloat16, which
    CPUs without such instructions take ten times as long for."""

    def __init__(self, params, lr, momentum=0.95, decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(mean, group["momentum"])
                wide = x.shape[0] <= x.shape[1]
                x = x if wide else x.T
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(x if wide else x.T, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def optimizers(model, rate):
    muon = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2]
    rest = [p for n, p in model.named_parameters()
            if not (n.startswith("blocks.") and p.dim() == 2)]
    return [
        Muon(muon, lr=rate),
        torch.optim.AdamW([{"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.02},
                           {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}],
                          lr=rate, betas=(0.9, 0.98), fused=True)]


def dense_loss(predictions, labels):
    """Patches with something on them count, the many without a little."""
    loss = 0.0
    for i, z in enumerate(predictions):
        y = labels[:, i].flatten().long()
        w = torch.where(y > 0, 1.0, 0.15)
        loss = loss + (F.cross_entropy(z.flatten(0, 1).float(), y, reduction="none") * w).sum() / w.sum()
    return loss


def place_loss(places, grid, n):
    cell = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).float() / 12 - 1
    return sum(F.mse_loss(p.unflatten(1, (n, -1)), cell.expand(p.shape[0], n, -1, -1))
               for p in places) / len(places)


class Tally:
    def __init__(self):
        self.ok, self.n, self.sums = [0] * 5, [0] * 5, []

    def add(self, logits, targets, kinds):
        hit = logits.argmax(-1) == targets
        for k in range(5):
            mine = (kinds == k) & (targets != 3)  # stops are easy
            self.ok[k] += int(hit[mine].sum())
            self.n[k] += int(mine.sum())

    def text(self):
        return " ".join("%s %.3f" % (w, o / max(1, n)) for w, o, n in zip(KINDS, self.ok, self.n))


def main():
    a = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(a.seed)
    lessons, model = Lessons(a.lessons), Vlm()
    if a.init:
        model.load_state_dict(torch.load(a.init), strict=True)
    opts = optimizers(model, a.rate)
    random = np.random.default_rng(a.seed)
    grids = [int(g) for g in a.grids.split(",")]
    tally, start, shown, number = Tally(), time.time(), time.time(), a.seed << 32
    with open(a.log, "a") as log:
        for step in range(a.steps):
            part = step / a.steps
            rate = a.rate * min(1, (step + 1) / a.warm) * (
                a.rate_end + (1 - a.rate_end) * 0.5 * (1 + math.cos(math.pi * part)))
            for opt, factor in zip(opts, (1.5, 1.0)):
                for group in opt.param_groups:
                    group["lr"] = rate * factor
            grid = grids[random.integers(len(grids))]
            n = 2 if random.random() < a.two else 1
            size = max(1, a.batch * (2 if grid == 16 else 1) // n)
            if grid == 12:
                size = a.batch * 2
            lesson = Lesson(lessons.defaults(grid), n, a.tokens, (ctypes.c_int32 * 4)(-1, -1, -1, -1), 1.3, 0.3)
            d = lessons.batch(range(number, number + size), lesson)
            number += size
            if a.stem_only:
                loss = dense_loss(model.dense(model.stem(d["rgb"].flatten(0, 1))[1]),
                                  d["labels"].flatten(0, 1))
                parts = (float(loss),)
            else:
                weight = a.ground * max(0.0, 1 - part / a.ground_end)
                ground = d["ground"].flatten(1, 2).flatten(2, 3) if weight > 0 else None
                logits, features, places, grounding = model(d["rgb"], d["tokens"], ground)
                targets, kind = d["targets"].flatten().long(), d["kinds"].flatten()
                asked = targets >= 0
                logits = logits.flatten(0, 1)[asked].float()
                ce = F.cross_entropy(logits, targets[asked])
                dense = dense_loss(model.dense(features), d["labels"].flatten(0, 1))
                where = place_loss(places, grid, n)
                loss = ce + a.dense * dense + a.places * where + weight * grounding
                tally.add(logits, targets[asked], kind[asked])
                parts = (float(ce), float(dense), float(where), float(grounding))
            for opt in opts:
                opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
            tally.sums.append(parts)
            if time.time() - shown > 20 or step + 1 == a.steps:
                shown = time.time()
                line = "step %d images %d seconds %.0f cpu %.0f rate %.1e losses %s | %s" % (
                    step + 1, number - (a.seed << 32), time.time() - start, time.process_time(),
                    rate, " ".join("%.3f" % m for m in np.mean(tally.sums, 0)), tally.text())
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                tally = Tally()
                torch.save(model.state_dict(), a.out)


main()
