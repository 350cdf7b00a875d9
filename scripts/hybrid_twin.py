#!/usr/bin/env python3
"""Trains a small model with every kind of parallelism at once, and the same model in PyTorch.

    scripts/hybrid_twin.py [MOE] [-- flags of moe train]

MOE: the program, by default build/release/moe/cli/moe. It trains for 20 steps on 8 rank threads,
TP 2 x PP 2 x EP 2, unless the flags say otherwise. The twin is plain PyTorch in float64 on one
process: no parallelism, torch.optim.AdamW, gradients by autograd. It begins with the weights that
moe draws (exported after a step with a learning rate of 1e-30) and reads the same sequences. Prints the
largest differences over all steps: relative ones of loss, balance loss and norm of gradients, and
of any element of the final weights, which a step moves by up to 1e-3. Exit code 1 if one is above
1e-6.

Needs PyTorch for CPUs, and no other package."""
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")  # PyTorch without NumPy
import torch
import torch.nn.functional as F

STEPS, SEED, LIMIT = 20, 7, 1e-6
LAYERS, HIDDEN, HEADS, KV_HEADS, EXPERTS, TOPK, SPARSE = 4, 64, 4, 2, 8, 2, 2
LENGTH, SEQUENCES, MICRO_BATCHES = 64, 2, 8
LR, WARMUP, DECAY, CLIP, BETAS, AUX, Z = 1e-3, 4, 0.1, 1.0, (0.9, 0.95), 0.01, 0.001
HELD_OUT_BLOCK = 16384  # bytes; the first block is trained on, the second one held out
MODEL = [
    "--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS,
    "--num-query-groups", KV_HEADS, "--add-qkv-bias", "--router", "qwen2", "--num-experts", EXPERTS,
    "--topk", TOPK, "--moe-ffn-hidden-size", 48, "--moe-layer-freq", SPARSE,
    "--dense-ffn-hidden-size", 96, "--moe-shared-expert-intermediate-size", 64,
    "--seq-length", LENGTH, "--micro-batch-size", SEQUENCES, "--micro-batches", MICRO_BATCHES,
    "--seed", SEED, "--moe-aux-loss-coeff", AUX, "--moe-z-loss-coeff", Z, "--clip-grad", CLIP,
    "--weight-decay", DECAY, "--tensor-leaves", 8, "--threads", 1]
HYBRID = ["--ranks", 8, "--tp", 2, "--pp", 2, "--ep", 2]


def run(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")


def trained(moe, folder, flags):
    """The lines of metrics.jsonl, and the weights of the export."""
    run([moe, "train", *MODEL, *flags, "-q", "--out", folder, "--save", folder + "/save"])
    run([moe, "ckpt", "export", folder + "/save", "--format", "qwen2_moe", "--out",
         folder + "/model"])
    with open(folder + "/metrics.jsonl", encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if "step" in line]
    with open(folder + "/model/model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    weights = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            values = torch.frombuffer(data[begin:end], dtype=torch.float32)
            weights[name] = values.reshape(tensor["shape"]).double()
    return lines, weights


def philox(seed, purpose, step, item):
    """The first 64 bits of Random4 (kernels/base/rng.h): Philox4x32-10 of Salmon et al., SC 2011."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (purpose << 32) * 0xD1342543DE82EF95) % 2**64
    key = [mixed % 2**32, mixed >> 32]
    c = [item % 2**32, item >> 32, step % 2**32, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b % 2**32, a >> 32 ^ c[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[0] << 32 | c[1]


def order(epoch, sequences):
    """The sequences of an epoch as lm::Sampler deals them (moe/lm/text_data.h)."""
    places = list(range(sequences))
    for last in range(sequences - 1, 0, -1):
        pick = philox(SEED, 2, epoch, last) * (last + 1) >> 64
        places[last], places[pick] = places[pick], places[last]
    return places


def batches(text):
    """Of every step the micro-batches [SEQUENCES, LENGTH + 1]."""
    train = text[:HELD_OUT_BLOCK]
    sequences, batch = (len(train) - 1) // LENGTH, SEQUENCES * MICRO_BATCHES
    for step in range(STEPS):
        epoch, place = divmod(step, sequences // batch)
        chosen = order(epoch, sequences)[place * batch:(place + 1) * batch]
        rows = torch.tensor([list(train[s * LENGTH:(s + 1) * LENGTH + 1]) for s in chosen])
        yield rows.split(SEQUENCES)


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x):  # [batch, heads, time, width]
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[2]).double(),
                        10000.0 ** (-torch.arange(half).double() / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(w, prefix, x):
    def heads(name, count):
        y = F.linear(x, w[f"{prefix}{name}_proj.weight"], w[f"{prefix}{name}_proj.bias"])
        return y.unflatten(-1, (count, -1)).transpose(1, 2)

    q, k, v = rotate(heads("q", HEADS)), rotate(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).flatten(2), w[prefix + "o_proj.weight"])


def network(w, prefix, x):
    hidden = F.silu(F.linear(x, w[prefix + "gate_proj.weight"]))
    return F.linear(hidden * F.linear(x, w[prefix + "up_proj.weight"]), w[prefix + "down_proj.weight"])


def mixture(w, prefix, x):
    """The block's output, and its balance and z-loss (docs/routing.md)."""
    logits = F.linear(x, w[prefix + "gate.weight"])
    probs = logits.softmax(-1)
    weight, chosen = probs.topk(TOPK)
    y = torch.sigmoid(F.linear(x, w[prefix + "shared_expert_gate.weight"]))
    y = y * network(w, prefix + "shared_expert.", x)
    for e in range(EXPERTS):
        token, slot = torch.where(chosen == e)
        out = network(w, f"{prefix}experts.{e}.", x[token]) * weight[token, slot, None]
        y = y.index_add(0, token, out)
    count = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
    balance = AUX * EXPERTS / (TOPK * len(x) ** 2) * (probs.sum(0) * count).sum()
    return y, balance, Z * logits.logsumexp(-1).square().mean()


def losses(w, rows):
    x, balance, z = w["model.embed_tokens.weight"][rows[:, :-1]], 0, 0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        x = x + attention(w, prefix + "self_attn.", norm(x, w[prefix + "input_layernorm.weight"]))
        y = norm(x, w[prefix + "post_attention_layernorm.weight"])
        if layer % SPARSE == SPARSE - 1:
            y, of_balance, of_z = mixture(w, prefix + "mlp.", y.flatten(0, 1))
            balance, z = balance + of_balance, z + of_z
        else:
            y = network(w, prefix + "mlp.", y)
        x = x + y.view_as(x)
    logits = F.linear(norm(x, w["model.norm.weight"]), w["lm_head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), balance, z


def rate(step):
    if step <= WARMUP:
        return LR * step / WARMUP
    return LR * (1 + math.cos(math.pi * (step - 1 - WARMUP) / (STEPS - WARMUP))) / 2


def twin(w, text):
    """Trains `w` in place; of every step its loss, balance loss and norm of gradients."""
    for tensor in w.values():
        tensor.requires_grad_()
    vectors = [t for t in w.values() if t.dim() == 1]
    matrices = [t for t in w.values() if t.dim() > 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                              {"params": vectors, "weight_decay": 0.0}], betas=BETAS, eps=1e-8)
    for step, micro_batches in enumerate(batches(text), 1):
        adam.zero_grad()
        loss = balance = 0.0
        for rows in micro_batches:
            of_rows, of_balance, of_z = losses(w, rows)
            ((of_rows + of_balance + of_z) / MICRO_BATCHES).backward()
            loss += of_rows.item() / MICRO_BATCHES
            balance += of_balance.item() / MICRO_BATCHES
        gradients = [t.grad for t in w.values() if t.grad is not None]
        length = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for gradient in gradients:
            gradient *= min(1.0, CLIP / length)
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        yield {"loss": loss, "aux_loss": balance, "grad_norm": length}


def main():
    torch.set_num_threads(1)
    words = sys.argv[1:]
    flags = words[words.index("--") + 1:] if "--" in words else []
    words = words[:words.index("--")] if "--" in words else words
    moe = os.path.abspath(words[0] if words else "build/release/moe/cli/moe")
    draw = random.Random(SEED)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 6))) for _ in range(60)]
    text = " ".join(draw.choices(vocabulary, k=8000)).encode()[:HELD_OUT_BLOCK + LENGTH + 1]
    with tempfile.TemporaryDirectory() as work:
        with open(work + "/text", "wb") as file:
            file.write(text)
        data = ["--data", work + "/text"]
        _, weights = trained(moe, work + "/initial", data + ["--ranks", 1, "--steps", 1, "--lr", 1e-30])
        lines, final = trained(moe, work + "/hybrid", data + HYBRID + [
            "--steps", STEPS, "--lr", LR, "--lr-warmup-steps", WARMUP] + flags)
    worst = {}
    for line, expected in zip(lines, twin(weights, text), strict=True):
        for key, value in expected.items():
            worst[key] = max(worst.get(key, 0), abs(line[key] - value) / value)
    worst["weights"] = max((final[name] - w).abs().max().item() for name, w in weights.items())
    print(f"{STEPS} steps, loss {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}")
    for key, value in worst.items():
        print(f"{key:10} differs by {value:.1e} at most, expected {LIMIT:.0e} or less")
    sys.exit(max(worst.values()) > LIMIT)


if __name__ == "__main__":
    main()
