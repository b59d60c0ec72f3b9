"""The small vision-language model in torch: what train.py trains and export.py writes.

A stem turns each 14 x 14 patch into a row; a decoder reads BOS, then for each image the word
IMAGE and its rows, then text. Positions enter only through rotary angles (M-RoPE): no tables.
"""
import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-5
BOS, IMAGE = 1, 2


class Shape:
    n_words, n_embd, n_layers, n_heads, n_kv_heads, head_dim, n_ff = 87, 128, 5, 4, 2, 64, 352
    rope_base, sections = 100.0, (12, 10, 10)
    patch, width, hidden, dilations = 14, 128, 256, (1, 2, 1)
    n_classes = (7, 9, 45, 13, 5)  # of the labels in picture.h


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), EPS)


class Stem(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.patch = nn.Linear(3 * s.patch**2, s.hidden)
        self.mix = nn.Linear(s.hidden, s.width)
        self.colour = nn.Linear(3, s.width)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(s.width)) for _ in s.dilations])
        self.convs = nn.ModuleList(
            [nn.Conv2d(s.width, s.width, 3, padding=d, dilation=d) for d in s.dilations])
        self.points = nn.ModuleList([nn.Linear(s.width, s.width) for _ in s.dilations])
        for point in self.points:
            nn.init.zeros_(point.weight)
            nn.init.zeros_(point.bias)
        self.norm = nn.Parameter(torch.ones(s.width))
        self.out = nn.Linear(s.width, s.n_embd)

    def forward(self, rgb):
        """rgb [B][14 g][14 g][3] bytes -> rows [B][g g][n_embd], features [B][g g][width]."""
        b, side = rgb.shape[:2]
        g = side // 14
        x = rgb.view(b, g, 14, g, 14, 3).transpose(2, 3).reshape(b, g * g, 196, 3).float() / 64 - 2
        mean = x.mean(2)
        # without the mean: else the brightness of a patch swamps its strokes
        h = self.colour(mean) + self.mix(F.gelu(self.patch((x - mean[:, :, None]).flatten(2))))
        for weight, conv, point in zip(self.norms, self.convs, self.points):
            y = norm(h, weight).transpose(1, 2).reshape(b, -1, g, g)
            h = h + point(F.gelu(conv(y)).flatten(2).transpose(1, 2))
        h = norm(h, self.norm)
        return self.out(h), h


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.norm1 = nn.Parameter(torch.ones(s.n_embd))
        self.norm2 = nn.Parameter(torch.ones(s.n_embd))
        self.qkv = nn.Linear(s.n_embd, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, bias=False)
        self.o = nn.Linear(s.n_heads * s.head_dim, s.n_embd, bias=False)
        self.gate_up = nn.Linear(s.n_embd, 2 * s.n_ff, bias=False)
        self.down = nn.Linear(s.n_ff, s.n_embd, bias=False)
        nn.init.normal_(self.o.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02)

    def heads(self, x, angles):
        s = self.s
        z = self.qkv(norm(x, self.norm1)).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
        q, k, v = z.split([s.n_heads, s.n_kv_heads, s.n_kv_heads], 1)
        return rotate(q, angles), rotate(k, angles), v

    def mlp(self, x):
        gate, up = self.gate_up(norm(x, self.norm2)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def pair_axes(s):
    """Which coordinate turns each pair: interleaved, as kvc_rope_axes says."""
    axes = torch.zeros(s.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis:3 * s.sections[axis]:3] = axis
    return axes


def angles_of(s, positions):
    """positions [B][N][3] -> cosines and sines [B][1][N][head_dim / 2]."""
    n = s.head_dim // 2
    f = s.rope_base ** (-torch.arange(n, dtype=torch.float64) / n)
    a = (positions[..., pair_axes(s)].double() * f).float()[:, None]
    return a.cos(), a.sin()


def rotate(x, angles):
    c, s = (a.to(x.dtype) for a in angles)
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def place(grid, n_tokens, lengths):
    """Positions of a dialogue. lengths: [B][n] tokens of text behind each image (the padding behind
    them counts on, unseen). Returns [B][N][3]."""
    b, n = lengths.shape
    cell = torch.arange(grid)
    rows = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), cell, cell)
    out, at = [torch.zeros(b, 1, 3, dtype=torch.long)], torch.ones(b, dtype=torch.long)
    for i in range(n):
        out.append(at[:, None, None].expand(b, 1, 3))
        out.append((at + 1)[:, None, None] + rows[None])
        at = at + 1 + grid
        out.append((at[:, None] + torch.arange(n_tokens))[..., None].expand(b, n_tokens, 3))
        at = at + lengths[:, i]
    return torch.cat(out, 1)


class Vlm(nn.Module):
    def __init__(self, s=Shape):
        super().__init__()
        self.s = s
        self.stem = Stem(s)
        self.embedding = nn.Embedding(s.n_words, s.n_embd)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.n_layers)])
        self.norm = nn.Parameter(torch.ones(s.n_embd))
        self.head = nn.Linear(s.n_embd, s.n_words, bias=False)
        nn.init.zeros_(self.head.weight)
        # only for training: dense labels from the stem, place in the grid from the decoder
        self.labels = nn.ModuleList([nn.Linear(s.width, n) for n in s.n_classes])
        self.places = nn.ModuleList([nn.Linear(s.n_embd, 2) for _ in range(2)])

    def dense(self, features):
        return [label(features) for label in self.labels]

    def forward(self, rgb, tokens, ground=None, ground_layers=(1, 2)):
        """rgb [B][n][side][side][3], tokens [B][n][t].

        Returns logits of the text [B][n t][words], stem features [B n][g g][width], place
        predictions, and the grounding loss: -log of the attention mass on the patches that a token
        should look at (ground [B][n t][n g g]; bit j: KV head j)."""
        s = self.s
        b, n, t = tokens.shape
        rows, features = self.stem(rgb.flatten(0, 1))
        cells = rows.shape[1]
        grid = int(cells**0.5)
        text = self.embedding(tokens).to(rows.dtype)
        rows = rows.view(b, n, cells, -1)
        word = self.embedding.weight.to(rows.dtype)
        parts, starts = [word[BOS].expand(b, 1, -1)], []
        at = 1
        for i in range(n):
            parts += [word[IMAGE].expand(b, 1, -1), rows[:, i], text[:, i]]
            starts.append((at + 1, at + 1 + cells))  # first patch, first token of text
            at += 1 + cells + t
        x = torch.cat(parts, 1)
        angles = angles_of(s, place(grid, t, (tokens != 0).sum(2)))
        seen = torch.ones(b, at, dtype=torch.bool)
        for i, (_, first) in enumerate(starts):
            seen[:, first:first + t] = tokens[:, i] != 0
        is_text = torch.zeros(at, dtype=torch.bool)
        is_patch = torch.zeros(at, dtype=torch.bool)
        for patch, first in starts:
            is_text[first:first + t] = True
            is_patch[patch:patch + cells] = True
        text_rows = is_text.nonzero()[:, 0]
        mask = (torch.arange(at)[None] <= torch.arange(at)[:, None])[None] & seen[:, None]
        group = s.n_heads // s.n_kv_heads
        loss, places, count = 0.0, [], 0
        for layer, block in enumerate(self.blocks):
            q, k, v = block.heads(x, angles)
            if ground is not None and layer in ground_layers:
                z = (q[:, :, text_rows].float().unflatten(1, (s.n_kv_heads, group))
                     @ k.float()[:, :, None].transpose(3, 4)) * s.head_dim**-0.5
                z = z.masked_fill(~mask[:, None, None, text_rows], -1e9).log_softmax(-1)[..., is_patch]
                for j in range(s.n_kv_heads):
                    wanted = (ground >> j & 1) > 0
                    mass = z[:, j].masked_fill(~wanted[:, None], -1e9).logsumexp(-1)
                    rows_wanted = wanted.any(-1)
                    loss = loss - (mass * rows_wanted[:, None]).sum() / (
                        rows_wanted.sum().clamp(min=1) * group)
                    count += 1
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            last = layer == s.n_layers - 1
            outs, at_row = [], 0
            for i, (patch, first) in enumerate(starts):
                if not last:
                    if i == 0:
                        outs.append(F.scaled_dot_product_attention(
                            q[:, :, :first], k[:, :, :first], v[:, :, :first], is_causal=True))
                    else:
                        outs.append(F.scaled_dot_product_attention(
                            q[:, :, patch - 1:first], k[:, :, :first], v[:, :, :first],
                            attn_mask=mask[:, None, patch - 1:first, :first]))
                end = first + t
                outs.append(F.scaled_dot_product_attention(
                    q[:, :, first:end], k[:, :, :end], v[:, :, :end],
                    attn_mask=mask[:, None, first:end, :end]))
            y = torch.cat(outs, 2).transpose(1, 2).flatten(2)
            if last:
                x = x[:, text_rows]  # only text is asked for its next word
            x = x + block.o(y)
            x = x + block.mlp(x)
            if layer < 2:
                places.append(self.places[layer](x[:, is_patch].float()))
        return self.head(norm(x, self.norm)), features, places, loss / max(1, count)
