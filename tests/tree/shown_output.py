#!/usr/bin/env python3
"""Runs the examples of pages, and compares what they print with what the pages show.

    shown_output.py [--quick] FOLDER_OF_MOE PAGE...

An example is a block of code whose first line is `$ moe ...`. Compared is what does not depend on the
machine and its load: counts, hashes, losses, texts, shares, not times. `moe bench` runs each size
once. --quick leaves out `moe sweep --measure train`, whose examples take a minute. Shell variables of
commands are what the page says: SMALL is `...`. A command that ends in `# kill -TERM` is stopped
after its first checkpoint. Exit code 1 where something differs, 2 where a page has an example of a kind not known here.
"""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time


def examples(text):
    """Of each block of examples: its commands, each with the lines shown below it."""
    for block in re.findall(r"^```\n(\$ moe .*?)^```", text, re.M | re.S):
        steps = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
        yield steps


def cells_of_table(lines, columns):
    """Rows `a | b | c`, without the columns whose names begin with one of `columns`."""
    header = None
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0] == "experts":
            header = cells
        elif header and len(cells) == len(header):
            yield [c for name, c in zip(header, cells) if not name.startswith(columns)]


def sweep(lines):
    return list(cells_of_table(lines, ("tok/s", "step ms", "a2a ms", "ar ms", "expert ms", "peak")))


def bench(lines):
    """Columns before the first time, #wrong and what routing makes of the bytes."""
    kept, found = [], []
    for line in lines:
        words = line.split()
        if line.startswith("#"):
            if "time" in words[1:]:
                names = words[1:]
                kept = [i for i, name in enumerate(names)
                        if i < names.index("time") or name in ("imb_tx", "imb_rx")]
            found += re.findall(r"drop [0-9.]+%, maxvio [0-9.]+, dead [0-9]+", line)
        elif words and kept:
            found.append([words[i] for i in kept if i < len(words)])
    return found


def train(lines):
    """The table of experts, the hash of the weights."""
    found, table = [], False
    for line in lines:
        table = table and re.match(r"[0-9]+ ", line) or line.startswith("layer ")
        if table or line.startswith("weights_xxh3"):
            found.append(line.split())
    return found


def generate(lines):
    return ["\n".join(lines).strip()]


def plan(lines):
    """All that is shown whole."""
    return [line.split() for line in lines if line.strip() and "..." not in line]


def compares(command):
    """Not what shows times alone, files alone, or where a signal came."""
    return not re.match(r"moe (bench p2p|ckpt)|.*# kill -TERM$", command)


KINDS = {"sweep": sweep, "bench": bench, "train": train, "generate": generate, "plan": plan}

# The published config.json of the model that pages plan, as far as it is read.
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1, "vocab_size": 151936,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}


def run(command, moe):
    stopped = command.endswith("# kill -TERM")
    line = command.split("#")[0].strip()
    words = shlex.split(line)
    if words[1] == "bench":
        words += ["-n", "1", "-w", "0", "-T", "0"]
    process = subprocess.Popen([moe] + words[1:], stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if stopped:
        saved = words[words.index("--save") + 1]
        while process.poll() is None and not os.path.exists(os.path.join(saved, "latest")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    if process.returncode != (11 if stopped else 0):
        return None, f"exit code {process.returncode}\n{err}"
    return out, None


def main():
    args = sys.argv[1:]
    quick = args[:1] == ["--quick"]
    moe, pages = os.path.join(os.path.abspath(args[quick]), "moe"), args[quick + 1:]
    failed, compared = [], 0
    for page in pages:
        text = open(page, encoding="utf-8").read()
        variables = dict(re.findall(r"([A-Z]+) is\s`([^`]*)`", text))
        for steps in examples(text):
            with tempfile.TemporaryDirectory() as scratch:
                os.chdir(scratch)
                os.mkdir("Qwen3-30B-A3B")
                with open("Qwen3-30B-A3B/config.json", "w", encoding="utf-8") as config:
                    json.dump(QWEN3_30B, config)
                for command, shown in steps:
                    for name, value in variables.items():
                        command = command.replace("$" + name, value)
                    kind = command.split()[1]
                    if quick and "sweep --measure train" in command:
                        continue
                    print("+", command, flush=True)
                    out, error = run(command, moe)
                    if error:
                        failed.append(f"{page}: fails: {command}\n{error}")
                        break
                    if not compares(command):
                        continue
                    if kind not in KINDS:
                        print(f"{page}: this test does not know `moe {kind}`", file=sys.stderr)
                        return 2
                    want, got = KINDS[kind](shown), KINDS[kind](out.splitlines())
                    compared += 1
                    if not want or any(line not in got for line in want):
                        failed.append(f"{page}: {command}\nshown   {want}\nprinted {got}")
                os.chdir("/")
    print(f"{compared} examples compared, {len(failed)} differ")
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed or not compared else 0


sys.exit(main())
