#!/usr/bin/env python3
"""Text to the token ids of a tokenizer.json, for moe train, eval and generate (docs/data.md).
Needs the package tokenizers (pip install tokenizers).

    tokenize.py --train 4096 --tokenizer bpe.json TEXT...   learns a byte-level BPE of 4,096 tokens
    tokenize.py --tokenizer bpe.json --out book TEXT...     writes book.bin and book.idx
    tokenize.py --tokenizer bpe.json --prompt 'Once upon'   prints ids for --prompt-tokens

TEXT is a file in UTF-8, one document; of a file whose name ends in .jsonl each line is an object, and
its member "text" a document. Behind each document comes the token --eod, if it is given; --train makes
one, <|endoftext|>. Ids are written in the format of Megatron's .bin and .idx, in 16 bits where they
fit. The last line names the flags of moe train that fit the files.
Exit codes: 0 ok, 2 usage, 3 malformed input, 4 a read or write failed, 10 no package tokenizers."""
import sys

# The folder of this script would hide the standard library's tokenize from what is imported below.
sys.path.pop(0)

import argparse
import array
import json
import os
import shlex
import struct

END_OF_TEXT = "<|endoftext|>"
MOST_OF_16_BITS = 1 << 16
TYPE_CODES = {"H": 8, "i": 4}  # of Megatron's index: uint16, int32


def fail(code, message):
    print(f"tokenize.py: {message}", file=sys.stderr)
    sys.exit(code)


def read(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        fail(3, f"{path}: byte {error.start} is no UTF-8, expected text")
    except (FileNotFoundError, IsADirectoryError) as error:
        fail(2, f"{path}: {error.strerror}, expected a text file")
    except OSError as error:
        fail(4, f"{path}: {error.strerror}")


def documents(paths):
    for path in paths:
        text = read(path)
        if not path.endswith(".jsonl"):
            yield text
            continue
        for number, line in enumerate(text.splitlines(), 1):
            try:
                document = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                document = None
            if not isinstance(document, str):
                fail(3, f"{path}: line {number} is no object with a text 'text'")
            yield document


def load(path):
    text = read(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises no narrower class
        fail(3, f"{path}: no tokenizer: {error}")


def train(args):
    if args.train < 257:
        fail(2, f"--train is {args.train}, expected at least 257: a token for each byte, and {END_OF_TEXT}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=args.train, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents(args.text), trainer)
    write(args.tokenizer, [tokenizer.to_str(pretty=True).encode()])
    print(f"{args.tokenizer}: {tokenizer.get_vocab_size():,} tokens")


def write(path, parts):
    """A whole file or none."""
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(unfinished, path)
    except OSError as error:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        fail(4, f"{path}: {error.strerror}")


def index_of(lengths, code, id_bytes):
    """Megatron's MMIDIDX, version 1: a document is a sequence."""
    yield b"MMIDIDX\0\0" + struct.pack("<QBqq", 1, TYPE_CODES[code], len(lengths), len(lengths) + 1)
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length * id_bytes)
    yield struct.pack(f"<{len(lengths)}i", *lengths)
    yield struct.pack(f"<{len(lengths)}q", *begins[:-1])
    yield struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))


def write_ids(tokenizer, args):
    end = []
    if args.eod is not None:
        end = [tokenizer.token_to_id(args.eod)]
        if end == [None]:
            fail(2, f"--eod is {args.eod}, expected a token of {args.tokenizer}")
    vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    code = "H" if vocabulary <= MOST_OF_16_BITS else "i"
    lengths = []

    def chunks():
        for text in documents(args.text):
            ids = array.array(code, tokenizer.encode(text, add_special_tokens=False).ids + end)
            if sys.byteorder == "big":
                ids.byteswap()
            lengths.append(len(ids))
            yield ids.tobytes()

    write(args.out + ".bin", chunks())
    write(args.out + ".idx", index_of(lengths, code, array.array(code).itemsize))
    flags = ["--tokens", args.out, "--tokenizer", args.tokenizer, "--vocab-size", str(vocabulary)]
    if end:
        flags += ["--eos-token-id", str(end[0])]
    print(f"{args.out}.bin: {sum(lengths):,} tokens of {len(lengths):,} documents")
    print(shlex.join(flags))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", metavar="FILE", required=True, help="tokenizer.json")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--train", metavar="N", type=int, help="learn a tokenizer of N tokens")
    work.add_argument("--out", metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    work.add_argument("--prompt", metavar="TEXT", help="print its ids")
    parser.add_argument("--eod", metavar="TOKEN", help="token behind each document")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="files")
    args = parser.parse_args()
    if bool(args.text) == (args.prompt is not None):
        fail(2, "--prompt and files, expected one of them" if args.text else "no file of text")
    if args.train is not None:
        return train(args)
    tokenizer = load(args.tokenizer)
    if args.prompt is None:
        return write_ids(tokenizer, args)
    print(",".join(map(str, tokenizer.encode(args.prompt).ids)))


if __name__ == "__main__":
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        fail(10, "the Python package tokenizers is not there: pip install tokenizers")
    main()
