"""Samples from the C library that draws the pictures: lesson.h."""
import ctypes

import numpy as np
import torch

from model import Shape


class Picture(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("grid", "min_things", "max_things")] + [
        ("min_radius", ctypes.c_float), ("max_radius", ctypes.c_float),
        ("min_fields", ctypes.c_int), ("max_fields", ctypes.c_int),
        ("distractors", ctypes.c_float), ("noise", ctypes.c_float)]


class Lesson(ctypes.Structure):
    _fields_ = [("picture", Picture), ("n_images", ctypes.c_int32), ("n_tokens", ctypes.c_int32),
                ("kinds", ctypes.c_int32 * 4), ("margin", ctypes.c_float),
                ("looks_back", ctypes.c_float)]


class Lessons:
    """Samples from the C library that draws the pictures."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        sizes = (ctypes.c_int32 * 4)()
        self.lib.lesson_sizes(sizes)
        assert tuple(sizes) == (Shape.n_words, len(Shape.n_classes), Shape.patch, 24), tuple(sizes)

    def defaults(self, grid):
        p = Picture()
        self.lib.picture_params_default(ctypes.c_int(grid), ctypes.byref(p))
        return p

    def batch(self, seeds, lesson):
        b, n, t = len(seeds), lesson.n_images, lesson.n_tokens
        g, side = lesson.picture.grid**2, lesson.picture.grid * 14
        out = dict(rgb=np.empty((b, n, side, side, 3), np.uint8),
                   labels=np.empty((b, n, len(Shape.n_classes), g), np.uint8),
                   tokens=np.empty((b, n, t), np.int32), targets=np.empty((b, n, t), np.int32),
                   kinds=np.empty((b, n, t), np.int32), ground=np.empty((b, n, t, n, g), np.uint8))
        for i, seed in enumerate(seeds):
            self.lib.lesson_draw(ctypes.c_uint64(seed), ctypes.byref(lesson),
                                 *(a[i].ctypes.data_as(ctypes.c_void_p) for a in out.values()))
        return {k: torch.from_numpy(a) for k, a in out.items()}
