#!/usr/bin/env python3
"""The way of docs/data.md from text to text, as it stands there: python3 text.py <moe> <source tree>.
Skipped without the package tokenizers."""
import json
import os
import re
import subprocess
import sys
import tempfile

try:
    import tokenizers
except ImportError:
    print("skipped: no Python package tokenizers")
    sys.exit(77)
from end_to_end import ENVIRONMENT, check, exit_code, run

MOE, ROOT = sys.argv[1:3]
SMALL = dict(MOE_NUM_LAYERS="1", MOE_HIDDEN_SIZE="32", MOE_NUM_ATTENTION_HEADS="2", MOE_NUM_EXPERTS="4",
             MOE_FFN_HIDDEN_SIZE="16", MOE_SEQ_LENGTH="32", MOE_STEPS="20", MOE_LR="0.01", MOE_RANKS="2")

with open(os.path.join(ROOT, "docs/data.md")) as file:
    section = file.read().split("## Text in, text out\n")[1]
script = re.search(r"```sh\n(.*?)```", section, re.S).group(1)
with tempfile.TemporaryDirectory() as work:
    with open(os.path.join(work, "book.txt"), "w") as file:
        for number in range(8000):
            file.write(f"Once upon a time é 你好 {number} the router sent every token to two experts.\n")
    os.symlink(os.path.join(ROOT, "scripts"), os.path.join(work, "scripts"))
    environment = {**ENVIRONMENT, **SMALL, "PATH": os.path.dirname(MOE) + ":" + os.environ["PATH"]}
    done = subprocess.run(["bash", "-ec", script], cwd=work, env=environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=300)
    check(done.returncode == 0, f"the page's commands: {done.stdout[-500:]} {done.stderr[-500:]}")
    per_byte = re.search(r"bits per token, ([0-9.]+) per byte", done.stdout)
    check(per_byte is not None, f"no bits per byte: {done.stdout}")

    path = lambda name: os.path.join(work, name)
    tokenizer = tokenizers.Tokenizer.from_file(path("model/tokenizer.json"))
    prompt = run(sys.executable, path("scripts/tokenize.py"), "--tokenizer", path("bpe.json"), "--prompt",
                 "Once upon").stdout.strip()
    words = []
    for model in ("run", "model"):
        answer = json.loads(run(MOE, "generate", "--checkpoint", path(model), "--prompt-tokens", prompt,
                                "--max-new-tokens", 40, "--quiet", "-o", "json").stdout)
        words.append(answer["tokens"])
        ids = answer["prompt_tokens"] + answer["tokens"]
        check(tokenizer.decode(ids).endswith(answer["text"]) and len(answer["text"]) > 9,
              f"{model}: {answer}, expected {tokenizer.decode(ids)!r}")
        printed = run(MOE, "generate", "--checkpoint", path(model), "--prompt-tokens", prompt,
                      "--max-new-tokens", 40, "--quiet").stdout
        check(printed == answer["text"] + "\n", f"{model} prints {printed!r}")
    check(words[0] == words[1], "run and export differ")

    # Bits per byte: those of a token over its mean bytes.
    answer = json.loads(run(MOE, "eval", "--checkpoint", path("run"), "--tokens", path("book"), "-o", "json").stdout)
    with open(path("book.bin"), "rb") as file:
        ids = [int.from_bytes(pair, "little") for pair in iter(lambda: file.read(2), b"")]
    text = tokenizer.decode(ids[1:answer["tokens"] + 1])
    check(abs(answer["text_bytes"] - len(text.encode())) <= 4, f"{answer}: expected {len(text.encode())} bytes")
    check(abs(answer["bits_per_byte"] / answer["bits_per_token"] * answer["text_bytes"] - answer["tokens"]) < 1e-3,
          f"{answer}")
    ids_alone = run(MOE, "generate", "--checkpoint", path("model"), "--tokenizer", "none", "--prompt-tokens", prompt,
                    "--max-new-tokens", 4, "--quiet").stdout
    check(re.fullmatch(r"\d+ \d+ \d+ \d+\n", ids_alone) is not None, f"ids: {ids_alone!r}")
    run(MOE, "generate", "--checkpoint", path("run"), "--prompt", "Once", code=2)
sys.exit(exit_code())
