#!/usr/bin/env python3
"""Mean loss in nats of a text under a model of transformers, in sequences as `moe eval` cuts them:
demo_loss.py FOLDER TEXT LENGTH"""
import sys

import torch
from transformers import AutoModelForCausalLM

folder, path, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                   output_loading_info=True)
if info["missing_keys"] or info["unexpected_keys"]:
    sys.exit(f"keys: {info}")
with open(path, "rb") as file:
    ids = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
count = (len(ids) - 1) // length
inputs = ids[:count * length].view(count, length)
targets = ids[1:count * length + 1]
with torch.no_grad():
    logits = model(inputs).logits.flatten(0, 1).double()
print(torch.nn.functional.cross_entropy(logits, targets).item())
