#!/usr/bin/env python3
"""Tokenizers of three kinds, and what the package tokenizers decodes: python3 generate_tokenizers.py OUT [N]

OUT/<kind>/tokenizer.json and OUT/<kind>/lines.jsonl, an object a line: "ids", and the "text" that they
stand for. The texts are N lines (default: 60) of the message catalogs below /usr/share/locale, one
language after the other, behind some that are hard to cut. tests/golden/tokenizers is the default;
of more lines:

    pip install tokenizers && python3 tests/golden/generate_tokenizers.py /tmp/lines 10000
    MOE_TOKENIZER_LINES=/tmp/lines build/release/tests/cli_test --gtest_filter='TokenTextTest.*'
"""
import gettext
import glob
import itertools
import json
import os
import random
import re
import sys

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

HARD = ["", " ", "  two  spaces ", "\ta\r\n\n", "\u0000\x1b[31m\x7f", "▁ ▁▁", "<0x41><0xe2>", "<s>", "Ġ Ċ é",
        "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇨🇭", "e\u0301 a\u0308\u0323 ﬁ Å", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया",
        "สวัสดีชาวโลก", "你好，世界", "こんにちは世界", "안녕하세요", "გამარჯობა", "Բարեւ աշխարհ", "ሰላም ልዑል", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠀋",
        "an <|a b|> and <|é|>"]


def catalogs():
    """Messages by language, in an order that every run has."""
    by_language = {}
    for path in sorted(glob.glob("/usr/share/locale/*/LC_MESSAGES/*.mo")):
        with open(path, "rb") as file:
            try:
                messages = gettext.GNUTranslations(file)._catalog.values()
            except (OSError, ValueError, LookupError):
                continue
        language = re.split(r"[@_]", path.split("/")[4])[0]
        by_language.setdefault(language, []).extend(m for m in messages if 20 < len(m) < 200)
    for messages in itertools.zip_longest(*by_language.values()):
        yield from (message for message in messages if message)


def byte_level(lines):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def pieces(lines):
    """SentencePiece's: words begin with U+2581, and characters without a token are bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=400, limit_alphabet=80, special_tokens=["<unk>", "<s>"], show_progress=False))
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def byte_fallback(lines):
    tokenizer = pieces(lines)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def metaspace(lines):
    tokenizer = pieces(lines)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def main():
    out, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    lines = HARD + list(itertools.islice(catalogs(), max(0, count - len(HARD))))
    draw = random.Random(7)
    for kind in (byte_level, byte_fallback, metaspace):
        tokenizer = kind(lines)
        tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<|a b|>", "<|é|>")])
        folder = os.path.join(out, kind.__name__)
        os.makedirs(folder, exist_ok=True)
        tokenizer.save(os.path.join(folder, "tokenizer.json"), pretty=False)
        special = tokenizer.token_to_id("<s>")
        with open(os.path.join(folder, "lines.jsonl"), "w") as file:
            for line in lines:
                ids = [special] + tokenizer.encode(line).ids
                if kind is byte_level and draw.random() < 0.1:  # what is no UTF-8, and ids of no token
                    draw.shuffle(ids)
                    ids.append(100000)
                json.dump({"ids": ids, "text": tokenizer.decode(ids)}, file, ensure_ascii=False)
                file.write("\n")


if __name__ == "__main__":
    main()
