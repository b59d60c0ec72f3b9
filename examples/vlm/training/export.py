"""Writes the trained model as one GGUF file: matrices F16, vectors F32."""
import argparse

import gguf
import numpy as np
import torch

from model import EPS, Shape, Vlm


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True, help="what train.py wrote")
    p.add_argument("--out", required=True)
    p.add_argument("--about", default="", help="recipe, seed and licence, for the file's metadata")
    a = p.parse_args()
    s, model = Shape, Vlm()
    model.load_state_dict(torch.load(a.model))
    w = gguf.GGUFWriter(a.out, "tinyvlm")
    w.add_name("libkvc tiny vision-language model")
    w.add_description(a.about)
    w.add_license("MIT")
    for key, value in (("block_count", s.n_layers), ("embedding_length", s.n_embd),
                       ("feed_forward_length", s.n_ff), ("context_length", 8192),
                       ("attention.head_count", s.n_heads),
                       ("attention.head_count_kv", s.n_kv_heads),
                       ("attention.key_length", s.head_dim),
                       ("attention.value_length", s.head_dim),
                       ("rope.dimension_count", s.head_dim),
                       ("vision.patch_size", s.patch),
                       ("vision.block_count", len(s.dilations)),
                       ("vision.embedding_length", s.width),
                       ("vision.feed_forward_length", s.hidden)):
        w.add_uint32("tinyvlm." + key, value)
    w.add_float32("tinyvlm.attention.layer_norm_rms_epsilon", EPS)
    w.add_float32("tinyvlm.rope.freq_base", s.rope_base)
    w.add_array("tinyvlm.rope.dimension_sections", list(s.sections) + [0])
    w.add_array("tinyvlm.vision.dilations", list(s.dilations))

    def put(name, tensor):
        data = tensor.detach().float().numpy()
        w.add_tensor(name, np.ascontiguousarray(data.astype(np.float16 if data.ndim > 1 else np.float32)))

    def put_linear(name, linear):
        put(name + ".weight", linear.weight)
        if linear.bias is not None:
            put(name + ".bias", linear.bias)

    stem = model.stem
    put_linear("v.patch_embd", stem.patch)
    put_linear("v.patch_mix", stem.mix)
    put_linear("v.colour_embd", stem.colour)
    for i, (weight, conv, point) in enumerate(zip(stem.norms, stem.convs, stem.points)):
        put("v.blk.%d.norm.weight" % i, weight)
        put("v.blk.%d.conv.weight" % i, conv.weight.permute(0, 2, 3, 1).flatten(1))
        put("v.blk.%d.conv.bias" % i, conv.bias)
        put_linear("v.blk.%d.point" % i, point)
    put("v.norm.weight", stem.norm)
    put_linear("v.proj", stem.out)
    put("token_embd.weight", model.embedding.weight)
    n_q, n_kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    for i, block in enumerate(model.blocks):
        q, k, v = block.qkv.weight.split([n_q, n_kv, n_kv])
        gate, up = block.gate_up.weight.chunk(2)
        for name, tensor in (("attn_norm", block.norm1), ("attn_q", q), ("attn_k", k),
                             ("attn_v", v), ("attn_output", block.o.weight),
                             ("ffn_norm", block.norm2), ("ffn_gate", gate), ("ffn_up", up),
                             ("ffn_down", block.down.weight)):
            put("blk.%d.%s.weight" % (i, name), tensor)
    put("output_norm.weight", model.norm)
    put("output.weight", model.head.weight)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
