#!/usr/bin/env python3
"""What other quantizers of the KV cache cost on a text: bits against KL, for docs/accuracy.md.

Usage: peers.py MODEL.gguf TEXT [--peer llama.cpp|openvino] [--csv|--json] [OPTIONS]
Needs numpy and llama-cpp-python==0.3.36 from PyPI; for OpenVINO also openvino==2026.4.1 and
openvino-genai==2026.4.1.0. run.sh installs and runs all of it.

The layout of the text is that of kvc-engine compare: chunks that follow each other, each read into
an empty cache, and of each the second half predicted. A model whose file asks for a BOS gets it in
place of the first token of each chunk. All caches of a run read the same tokens side by side, and
none keeps recent tokens or sinks exact.

Weights are those of the file, multiplied as fp32. llama.cpp multiplies quantized weights with
activations that it rounds to 8 bits, and that rounding answers to the slightest change with a KL
of its own, ten times that of q8_0; --weights file leaves it in, as its users meet it.

llama.cpp reads with flash attention, which a quantized V needs; for quantized K it rounds Q to 8
bits. A row is K or K/V in its types; ":plain" turns its rotation of Q, K and V off, which is on for
quantized types otherwise. There is no parameter for this: a cache reads the environment variable
LLAMA_ATTN_ROT_DISABLE when it is made, and what it then says in the log is checked. Bits are those
of its blocks of 32. Its AMX kernels are not used: they crash on some processors.

OpenVINO runs the stateful model that openvino-genai makes of the GGUF file. What its
reader makes of Q4_1 predicts much worse than the file, so it gets the weights as fp16, and rounds
no activations; --weights file gives it the file and lets it round. Codes are by token; a row
"u4:32" has a scale and a zero point, fp32 each, for 32 channels, "u4" one for the head. A call
with an empty cache attends to exact K and V, so the first token is read alone.

Figures are those of the predicted positions: mean KL(base || row) in nats and its 99th percentile,
the share of positions where the likeliest token is the base's, perplexity and its change in per
cent. The base is the row f16 of the same engine. Bytes are of a token in all layers.
"""
import argparse
import concurrent.futures
import csv
import ctypes
import json
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads crawl on busy cores

import llama_cpp
import numpy as np

BASE = "f16"
ROWS = {"llama.cpp": "q8_0,q8_0/q4_0,q4_0,q8_0:plain,q8_0/q4_0:plain,q4_0:plain",
        "openvino": "u8,u8/u4,u4,u4:32"}
GGML_BLOCK = 32
GGML_TYPES = {  # the type and the bytes of a block
    "f16": (llama_cpp.GGML_TYPE_F16, 64), "q8_0": (llama_cpp.GGML_TYPE_Q8_0, 34),
    "q5_1": (llama_cpp.GGML_TYPE_Q5_1, 24), "q5_0": (llama_cpp.GGML_TYPE_Q5_0, 22),
    "q4_1": (llama_cpp.GGML_TYPE_Q4_1, 20), "q4_0": (llama_cpp.GGML_TYPE_Q4_0, 18),
    "iq4_nl": (llama_cpp.GGML_TYPE_IQ4_NL, 18)}
OPENVINO_BITS = {"f16": 16, "u8": 8, "u4": 4}
CALL, SCORED_CALL = 512, 128  # tokens of a call; fewer where logits of each are wanted
LOG = []  # of llama.cpp
COLUMNS = ["model", "text", "name", "bits", "bytes_token", "kl", "kl_p99", "top1", "ppl", "dppl",
           "bucket", "positions", "chunks", "weights"]


def split_row(row):
    """Type of K, type of V and what follows the colon."""
    types, _, option = row.partition(":")
    k, _, v = types.partition("/")
    return k, v or k, option


@llama_cpp.llama_log_callback
def keep_log(_level, text, _user):
    LOG.append(text.decode(errors="replace"))


def last_log():
    return "".join(LOG[-3:]).strip()


def convert_weights(path, copy, ftype):
    """A copy of a GGUF file with its weights in one type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    if llama_cpp.llama_model_quantize(str(path).encode(), str(copy).encode(),
                                      ctypes.byref(params)) != 0:
        sys.exit(f"{path}: {last_log()}")
    return copy


class LlamaModel:
    """A GGUF file as llama.cpp reads it; with vocab_only just its tokenizer."""

    def __init__(self, path, weights="file", vocab_only=False):
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        params.use_extra_bufts = False  # AMX
        with tempfile.TemporaryDirectory() as folder:
            if weights == "f32":
                path = convert_weights(path, pathlib.Path(folder, "f32.gguf"),
                                       llama_cpp.LLAMA_FTYPE_ALL_F32)
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            sys.exit(f"{path}: {last_log()}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def meta(self, key):
        text = ctypes.create_string_buffer(64)
        n = llama_cpp.llama_model_meta_val_str(self.model, key.encode(), text, len(text))
        return text.value.decode() if n >= 0 else None

    def values_per_token(self):
        """Values of K of one token in all layers; V has as many."""
        length = self.meta(self.meta("general.architecture") + ".attention.key_length")
        head_dim = int(length or llama_cpp.llama_model_n_embd(self.model) //
                       llama_cpp.llama_model_n_head(self.model))
        return (llama_cpp.llama_model_n_layer(self.model) *
                llama_cpp.llama_model_n_head_kv(self.model) * head_dim)

    def tokenize(self, text):
        ids = (llama_cpp.llama_token * (len(text) + 1))()
        n = llama_cpp.llama_tokenize(self.vocab, text, len(text), ids, len(ids), False, False)
        return np.array(ids[:n], np.int32)

    def bos(self):
        """The token each chunk begins with, or None."""
        if not llama_cpp.llama_vocab_get_add_bos(self.vocab):
            return None
        return llama_cpp.llama_vocab_bos(self.vocab)


class LlamaCache:
    """A context of llama.cpp, and the sequence in its cache."""

    def __init__(self, model, row, n_context, n_threads):
        k, v, option = split_row(row)
        rotated = option != "plain" and any(t != "f16" for t in (k, v))
        self.model, self.name = model, "llama.cpp " + row.replace(":", " ")
        self.bits = tuple(8 * GGML_TYPES[t][1] / GGML_BLOCK for t in (k, v))
        self.bytes = model.values_per_token() * sum(self.bits) / 8
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = (n_context + 255) // 256 * 256
        params.n_batch = params.n_ubatch = CALL
        params.n_outputs_max = SCORED_CALL
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v = GGML_TYPES[k][0], GGML_TYPES[v][0]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        os.environ["LLAMA_ATTN_ROT_DISABLE"] = "0" if rotated else "1"
        LOG.clear()
        self.context = llama_cpp.llama_init_from_model(model.model, params)
        if not self.context:
            sys.exit(f"{row}: {last_log()}")
        if rotated != any("attn_rot_k = 1" in line or "attn_rot_v = 1" in line
                          for line in LOG):
            sys.exit(f"{row}: rotation is not as asked")
        self.batch = llama_cpp.llama_batch_init(CALL, 0, 1)

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def read(self, tokens, first, wanted):
        """Logits of the tokens, valid until the next call, if they are wanted."""
        n, batch = len(tokens), self.batch
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), first + i, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(self.context, batch) != 0:
            sys.exit(f"{self.name}: llama_decode failed")
        if not wanted:
            return None
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (n, self.model.n_vocab))


class OpenvinoModel:
    """The model that openvino-genai makes of a GGUF file and saves beside it."""

    def __init__(self, path, weights):
        import openvino
        import openvino_genai
        self.config = {"INFERENCE_PRECISION_HINT": "f32"}
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "model.gguf")
            if weights == "f32":
                self.config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
                convert_weights(path, copy, llama_cpp.LLAMA_FTYPE_MOSTLY_F16)
            else:
                copy.symlink_to(pathlib.Path(path).resolve())
            try:
                openvino_genai.LLMPipeline(copy, "CPU", ATTENTION_BACKEND="SDPA",
                                           enable_save_ov_model=True)
            except RuntimeError as error:
                sys.exit(f"openvino-genai cannot read {path}: {error}")
            self.core = openvino.Core()
            self.core.set_property({"ENABLE_MMAP": False})
            self.model = self.core.read_model(copy.with_name("openvino_model.xml"))


class OpenvinoCache:
    """A compiled model, and the state of its request."""

    def __init__(self, model, row, _n_context, n_threads):
        k, v, group = split_row(row)
        self.name = "OpenVINO " + row.replace(":", " g")
        config = {**model.config, "INFERENCE_NUM_THREADS": n_threads, "ENABLE_CPU_PINNING": False,
                  "KEY_CACHE_PRECISION": k, "VALUE_CACHE_PRECISION": v}
        if group:
            config.update(KEY_CACHE_GROUP_SIZE=int(group), VALUE_CACHE_GROUP_SIZE=int(group))
        self.request = model.core.compile_model(model.model, "CPU", config).create_infer_request()
        # States are [batch][head][token][channel], as many of K as of V.
        shapes = [state.state.shape for state in self.request.query_state()]
        heads, head_dim = shapes[0][1], shapes[0][3]
        self.bits = tuple(OPENVINO_BITS[t] + (64 / int(group or head_dim) if t[0] == "u" else 0)
                          for t in (k, v))
        self.bytes = len(shapes) / 2 * heads * head_dim * sum(self.bits) / 8

    def clear(self):
        self.request.reset_state()

    def read(self, tokens, first, _wanted):
        """Logits of the tokens, valid until the next call."""
        if first > 0:
            return self.infer(tokens, first)
        return np.concatenate([self.infer(tokens[:1], 0).copy(), self.infer(tokens[1:], 1)])

    def infer(self, tokens, first):
        n = len(tokens)
        return self.request.infer({
            "input_ids": tokens[None].astype(np.int64),
            "attention_mask": np.ones((1, first + n), np.int64),
            "position_ids": np.arange(first, first + n)[None],
            "beam_idx": np.zeros(1, np.int32)}, share_outputs=True)[0][0]


def log_softmax(row):
    x = row.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


def score_position(rows, target):
    """Of each row: KL(rows[0] || row), -ln p(target), whether its top is that of rows[0]."""
    base, top = log_softmax(rows[0]), rows[0].argmax()
    p = np.exp(base)
    scores = []
    for row in rows:
        q = log_softmax(row)
        scores.append((p @ (base - q), -q[target], row.argmax() == top))
    return scores


def read_chunk(caches, tokens, first_scored, pool):
    """Scores [position][cache][3] of the positions from first_scored on; the last predicts none."""
    scores, end = [], len(tokens) - 1
    for cache in caches:
        cache.clear()
    at = 0
    while at < end:
        wanted = at >= first_scored
        n = min(SCORED_CALL, end - at) if wanted else min(CALL, first_scored - at)
        logits = [cache.read(tokens[at:at + n], at, wanted) for cache in caches]
        if wanted:
            positions = [[rows[i] for rows in logits] for i in range(n)]
            scores += pool.map(score_position, positions, tokens[at + 1:at + n + 1])
        at += n
    return np.array(scores)


def figures(scores, r):
    """Of the positions of scores, for row r."""
    kl, ppl = scores[:, r, 0], np.exp(scores[:, r, 1].mean())
    return {"kl": kl.mean(), "kl_p99": np.percentile(kl, 99), "top1": scores[:, r, 2].mean(),
            "ppl": ppl, "dppl": 100 * (ppl / np.exp(scores[:, 0, 1].mean()) - 1)}


def result_rows(args, caches, scores):
    """A dictionary a row of the result and bucket; scores are [chunk][position][cache][3]."""
    first = args.first + 1  # the first predicted token
    parts = [("all", scores)]
    if args.bucket:
        for start in range(first // args.bucket * args.bucket, args.context, args.bucket):
            part = scores[:, max(start - first, 0):start + args.bucket - first]
            parts.append((f"{start}-{min(start + args.bucket, args.context) - 1}", part))
    rows = []
    for r, cache in enumerate(caches):
        for bucket, part in parts:
            flat = part.reshape(-1, len(caches), 3)
            rows.append({"model": pathlib.Path(args.model).stem,
                         "text": pathlib.Path(args.text).name, "name": cache.name,
                         "bits": sum(cache.bits) / 2, "bytes_token": cache.bytes,
                         **figures(flat, r), "bucket": bucket, "positions": len(flat),
                         "chunks": len(scores), "weights": args.weights})
    return rows


def print_rows(rows, args, seconds):
    if args.json:
        print(json.dumps({"peer": args.peer, "context": args.context, "first": args.first,
                          "seconds": round(seconds, 1), "rows": rows}, indent=1))
        return
    texts = [{key: f"{x:.6g}" if isinstance(x, float) else str(x) for key, x in row.items()}
             for row in rows]
    if args.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(texts)
        return
    columns = COLUMNS[2:-2]
    widths = [max(len(row[c]) for row in [*texts, {c: c}]) for c in columns]
    for row in [dict(zip(columns, columns)), *texts]:
        print("  ".join(row[c].ljust(w) if c == "name" else row[c].rjust(w)
                        for c, w in zip(columns, widths)))


def load_chunks(args, vocabulary):
    if args.tokens:
        ids = np.array(json.loads(pathlib.Path(args.tokens).read_bytes())["tokens"], np.int32)
    else:
        ids = vocabulary.tokenize(pathlib.Path(args.text).read_bytes())
    n = min(args.chunks, len(ids) // args.context)
    if n == 0:
        sys.exit(f"{args.text} has {len(ids)} tokens, fewer than {args.context}")
    chunks = ids[:n * args.context].reshape(n, args.context)
    if vocabulary.bos() is not None and not args.no_bos:
        chunks[:, 0] = vocabulary.bos()
    return chunks


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--peer", choices=ROWS, default="llama.cpp")
    parser.add_argument("--weights", choices=["f32", "file"], default="f32",
                        help="multiplied as fp32, or as the engine does with the types of the file")
    parser.add_argument("--rows", help=f"beside {BASE}; K or K/V, with :plain or :GROUP")
    parser.add_argument("--tokens", help="what kvc-engine tokens --json says of the text; "
                        "without it llama.cpp splits the text")
    parser.add_argument("--no-bos", action="store_true", help="chunks begin as the text does")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a chunk (2048)")
    parser.add_argument("--chunks", type=int, default=10, help="most chunks to run (10)")
    parser.add_argument("--first", type=int, help="position that predicts first (half a chunk)")
    parser.add_argument("--bucket", type=int, help="also report each so many positions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    args.rows = [BASE, *(args.rows or ROWS[args.peer]).split(",")]
    args.first = args.context // 2 if args.first is None else args.first
    types = GGML_TYPES if args.peer == "llama.cpp" else OPENVINO_BITS
    for row in args.rows:
        if any(t not in types for t in split_row(row)[:2]):
            parser.error(f"{row} is not of {', '.join(types)}")
    if not 0 <= args.first < args.context - 1:
        parser.error("--first is not within the context")
    return args


def main():
    args = parse_arguments()
    start = time.monotonic()
    llama_cpp.llama_log_set(keep_log, None)
    llama_cpp.llama_backend_init()
    if args.peer == "llama.cpp":
        model = vocabulary = LlamaModel(args.model, args.weights)
        new_cache = LlamaCache
    else:
        vocabulary = LlamaModel(args.model, vocab_only=True)
        model, new_cache = OpenvinoModel(args.model, args.weights), OpenvinoCache
    chunks = load_chunks(args, vocabulary)
    caches = [new_cache(model, row, args.context, args.threads) for row in args.rows]
    scores = []
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        for i, chunk in enumerate(chunks):
            scores.append(read_chunk(caches, chunk, args.first, pool))
            done = np.concatenate(scores)
            kl = " ".join(f"{x:.6f}" for x in done[:, :, 0].mean(0))
            print(f"chunk {i + 1} of {len(chunks)}: KL {kl} "
                  f"({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
    print_rows(result_rows(args, caches, np.array(scores)), args, time.monotonic() - start)


if __name__ == "__main__":
    main()
