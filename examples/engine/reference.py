#!/usr/bin/env python3
"""Expected logits, greedy tokens and token ids of a GGUF llama model, for the tests of the engine.

Usage: reference.py logits|tokens MODEL.gguf > OUT.inc
Needs numpy, gguf and tokenizers from PyPI.

Weights are dequantized by the gguf package, texts are split by the tokenizers package, the forward
pass is numpy: nothing of the engine is used. K and V are kept in fp32; with --f16 they are rounded
to half, as an F16 cache does.
"""
import argparse
import textwrap

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PROMPTS = [
    "The old lighthouse keeper climbed the stairs every evening, and when he reached the top he",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    a, b = 0, 1\n"
    "    for i in range(2, 1024):\n",
    "<|im_start|>user\nWhat is the capital of Italy, and why is it called eternal? "
    "Caf\u00e9 \u2192 \u6771\u4eac \U0001f600<|im_end|>\n<|im_start|>assistant\n",
]
TEXTS = [
    "Hello world", " Hello  world ", "a", "   ", "\n", "\n\n\n", "\t\tif x:\n\t\t\treturn  1\n",
    "a\r\nb\r\n\r\nc", "line one\n  line two\n\n    line three", "trailing space ",
    "two  spaces   three    four", "2048", "In 1969, 12,345.678 x 10^-9", "abc123def456",
    " 7 8  9   10", "a  1", "\u0663\u0664 \u2167 \u00bd \u00b2",
    "I'm you're we've he'll she'd it's don't I'M YOU'RE", "'s 't ''s 'x",
    "caf\u00e9 na\u00efve r\u00e9sum\u00e9", "cafe\u0301 A\u030a",
    "\u6771\u4eac\u90fd \u3068\u5927\u962a",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0645\u0631\u062d\u0628\u0627 \u0639\u0644\u064a\u0643\u0645",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\ud55c\uad6d\uc5b4 \uc785\ub2c8\ub2e4",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ee\U0001f1f9",
    "non\u00a0breaking\u2003em\u3000wide\u2028line", "a \u00a0b", "n \u0085m", "v \u180ew",
    "em \u2003q", "zero\u200bwidth\ufeffmark\u00ad\u180e x",
    "int main(void) { return a[i]->b != 0 && !c; } /* ok */",
    "https://example.org/a_b?c=d&e=%20f#g", "!!! ... --- ___ ~~~ ``` \u2014\u2026\u201cq\u201d",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "x" + " " * 70 + "y",
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_end|><|endoftext|>x", "<|im_start|",
    "\u00ff\u0100\u0120 G",
]
N_GREEDY = 64
TOP = 8      # logits kept of every position
STRIDE = 16  # every 16th logit of the last position is kept


def load(path):
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = {}
    for t in reader.tensors:
        shape = [int(n) for n in t.shape][::-1]
        weights[t.name] = np.asarray(dequantize(t.data, t.tensor_type), np.float32).reshape(shape)
    return fields, weights


def make_tokenizer(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer


class Model:
    def __init__(self, fields, weights, f16):
        self.w, self.f16 = weights, f16
        self.layers = fields["llama.block_count"]
        self.heads = fields["llama.attention.head_count"]
        self.kv_heads = fields["llama.attention.head_count_kv"]
        self.dim = fields["llama.embedding_length"] // self.heads
        self.eps = np.float32(fields["llama.attention.layer_norm_rms_epsilon"])
        self.base = float(fields["llama.rope.freq_base"])
        self.output = weights.get("output.weight", weights["token_embd.weight"])
        self.reset()

    def reset(self):
        self.k = [np.zeros((0, self.kv_heads, self.dim), np.float32) for _ in range(self.layers)]
        self.v = [np.zeros((0, self.kv_heads, self.dim), np.float32) for _ in range(self.layers)]

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * self.w[name + ".weight"]

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T

    def rotate(self, x, first):
        frequency = self.base ** (-np.arange(0, self.dim, 2) / self.dim)
        angle = np.arange(first, first + len(x))[:, None] * frequency
        c, s = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack((a * c - b * s, a * s + b * c), -1).reshape(x.shape)

    def keep(self, x):
        return x.astype(np.float16).astype(np.float32) if self.f16 else x

    def attention(self, x, i):
        n, first = len(x), len(self.k[i])
        blk = f"blk.{i}.attn_"
        q = self.rotate(self.linear(x, blk + "q").reshape(n, self.heads, self.dim), first)
        k = self.rotate(self.linear(x, blk + "k").reshape(n, self.kv_heads, self.dim), first)
        v = self.linear(x, blk + "v").reshape(n, self.kv_heads, self.dim)
        self.k[i] = np.concatenate((self.k[i], self.keep(k)))
        self.v[i] = np.concatenate((self.v[i], self.keep(v)))
        group = self.heads // self.kv_heads
        hidden = np.arange(first + n)[None] > np.arange(first, first + n)[:, None]
        out = np.empty_like(q)
        for h in range(self.heads):
            s = q[:, h] @ self.k[i][:, h // group].T / np.float32(np.sqrt(self.dim))
            s[hidden] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ self.v[i][:, h // group]
        return self.linear(out.reshape(n, -1), blk + "output")

    def forward(self, tokens):
        x = self.w["token_embd.weight"][tokens]
        for i in range(self.layers):
            x = x + self.attention(self.norm(x, f"blk.{i}.attn_norm"), i)
            h = self.norm(x, f"blk.{i}.ffn_norm")
            gate = self.linear(h, f"blk.{i}.ffn_gate")
            h = gate / (1 + np.exp(-gate)) * self.linear(h, f"blk.{i}.ffn_up")
            x = x + self.linear(h, f"blk.{i}.ffn_down")
        return self.norm(x, "output_norm") @ self.output.T


def wrapped(items):
    return textwrap.fill(", ".join(items), 110)


def write_logits(fields, weights, f16):
    """One initializer of struct reference a prompt."""
    model, tokenizer = Model(fields, weights, f16), make_tokenizer(fields)
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt).ids
        model.reset()
        logits = model.forward(tokens)
        print(f"{{.n_tokens = {len(tokens)},\n.tokens = {{{wrapped(map(str, tokens))}}},")
        print(".top = {")
        for row in logits:
            top = np.argsort(-row, kind="stable")[:TOP]
            print("{" + wrapped(f"{{{i}, {row[i]:.5f}f}}" for i in top) + "},")
        print("},\n.every = {" + wrapped(f"{x:.4f}f" for x in logits[-1][::STRIDE]) + "},")
        row, greedy = logits[-1], []
        for _ in range(N_GREEDY):
            second, first = np.sort(row)[-2:]
            greedy.append(f"{{{np.argmax(row)}, {first - second:.4f}f}}")
            row = model.forward([int(np.argmax(row))])[-1]
        print(".greedy = {" + wrapped(greedy) + "}},")


def write_tokens(fields):
    """One initializer of struct golden a text: bytes in octal, then ids."""
    tokenizer = make_tokenizer(fields)
    for text in TEXTS:
        data = text.encode()
        ids = tokenizer.encode(text).ids
        plain = [32 <= b < 127 and b not in b'"\\?' for b in data]
        quoted = "".join(chr(b) if p else f"\\{b:03o}" for b, p in zip(data, plain))
        print(f'{{"{quoted}", {len(ids)},\n{{{wrapped(map(str, ids))}}}}},')


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["logits", "tokens"])
    parser.add_argument("model")
    parser.add_argument("--f16", action="store_true", help="round K and V to half")
    args = parser.parse_args()
    fields, weights = load(args.model)
    if args.what == "logits":
        write_logits(fields, weights, args.f16)
    else:
        write_tokens(fields)


if __name__ == "__main__":
    main()
