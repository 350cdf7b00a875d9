#!/usr/bin/env python3
"""Writes corpus/<target>/: small valid and hostile files to start the fuzzers from."""
import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).parent / "corpus"


def write(target, name, content):
    path = ROOT / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def safetensors(header, data=b"", size=None):
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    return struct.pack("<Q", len(text) if size is None else size) + text.encode() + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def main():
    good = {
        "__metadata__": {"format": "pt"},
        "w": tensor("F32", [1, 2], 3, 11),
        "b": tensor("U8", [3], 0, 3),
        "h": tensor("F16", [2], 11, 15),
        "g": tensor("BF16", [1], 15, 17),
        "d": tensor("F64", [], 17, 25),
        "e": tensor("I64", [0, 4], 25, 25),
    }
    files = {
        "good": safetensors(good, bytes(range(25))),
        "empty": safetensors({}),
        "hole": safetensors({"a": tensor("U8", [1], 1, 2)}, b"12"),
        "overlap": safetensors({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, b"123"),
        "rest": safetensors({"a": tensor("U8", [1], 0, 1)}, b"12"),
        "huge": safetensors({"a": tensor("F32", [2**60], 0, 8)}, bytes(8)),
        "overflow": safetensors({"a": tensor("U8", [2**32, 2**32], 0, 0)}),
        "subbyte": safetensors({"a": tensor("F4", [2, 3], 0, 3)}, b"123"),
        "twice": safetensors('{"a":{"dtype":"U8","dtype":"U8"}}'),
        "deep": safetensors('{"a":' * 8 + "[" * 40),
        "length": safetensors({}, size=2**64 - 1),
        "padded": safetensors("{}      "),
        "escaped": safetensors({"\u00e9\n\"": tensor("I32", [1], 0, 4)}, bytes(4)),
    }
    for name, content in files.items():
        write("safetensors", name, content)

    def index(weights):
        return json.dumps({"metadata": {"total_size": 8}, "weight_map": weights})

    for name, content in {
        "good": index({"w.a": "s-1.safetensors", "w.b": "s-2.safetensors"}),
        "up": index({"w": "../x.safetensors"}),
        "root": index({"w": "/x.safetensors"}),
        "nul": index({"w": "x\u0000.safetensors"}),
        "number": index({"w": 1}),
        "list": '{"weight_map":["x.safetensors"]}',
        "none": '{"metadata":{}}',
        "twice": '{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}',
    }.items():
        write("index", name, content)

    for name, content in {
        "mixtral": '{"model_type":"mixtral","architectures":["MixtralForCausalLM"],'
                   '"hidden_size":64,"intermediate_size":128,"num_local_experts":8,'
                   '"num_experts_per_tok":2,"rms_norm_eps":1e-05,"sliding_window":null,'
                   '"tie_word_embeddings":false}',
        "nested": '{"text_config":{"rope_scaling":{"factor":8.0}},"quantization_config":{}}',
        "numbers": "[0,-0,1.5e-3,18446744073709551615,-9223372036854775808,1e999]",
        "strings": '["\\u00e9\\ud83d\\ude00\\n","\\ud800","\x7f"]',
        "twice": '{"hidden_size":1,"hidden_size":2}',
        "deep": "[" * 40,
        "cut": '{"hidden_size":',
        "bom": b"\xef\xbb\xbf{}",
        "latin": b'"\xe9"',
    }.items():
        write("config", name, content)

    header = {"schema": "moe.routing/1", "ranks": 2, "expert_parallel_size": 2, "num_experts": 3,
              "topk": 2, "hidden_size": 64, "dtype": "bf16", "moe_layers": 2}
    record = {"step": 7, "layer": 0, "tokens": [4, 5], "slots": [[4, 3, 1], [0, 5, 5]]}
    for name, values in {
        "good": (header, record, {**record, "layer": 1}),
        "header": (header,),
        "backwards": (header, {**record, "layer": 1}, record),
        "ragged": (header, {**record, "slots": [[4, 3], [0, 5, 5]]}),
        "most": ({**header, "ranks": 4096, "num_experts": 16384}, record),
        "past": (header, {**record, "tokens": [2**63, 2**64 - 1]}),
        "over": (header, {**record, "tokens": [3, 5]}),
        "schema": ({**header, "schema": "moe.routing/2"}, record),
    }.items():
        write("routing", name, "".join(json.dumps(line) + "\n" for line in values))

    # Without the checksum, which the target adds.
    sections = "".join(f',"{key}":{{}}' for key in
                       ("numerics", "model", "optimizer", "trainer", "data", "written_by", "hash"))
    sections = sections.replace('"trainer":{}', '"trainer":{"seed":1,"list":[0.5,{"x":null}]}')
    head = '{"format":"moe-checkpoint","version":1,"step":120,"created":"2026-11-23T07:10:00Z"'
    tensors = {"a.weight": {"dtype": "F32", "shape": [4, 6], "states": ["m", "master"]},
               "shares": {"dtype": "F64", "shape": [1, 4], "states": ["share"]}}
    shards = [{"name": f"shard-0000{i}-of-00002.safetensors", "bytes": 900, "header_xxh3": "0" * 16}
              for i in range(2)]
    boxes = [{"tensor": name, "state": state, "box": box, "file": file, "xxh3": "0123456789abcdef"}
             for name, state, box, file in (
                 ("a.weight", "m", [0, 4, 0, 6], 0), ("a.weight", "master", [0, 3, 0, 2], 0),
                 ("a.weight", "master", [0, 2, 2, 6], 1), ("a.weight", "master", [2, 4, 2, 6], 0),
                 ("a.weight", "master", [3, 4, 0, 2], 1), ("shares", "share", [0, 1, 0, 4], 1))]

    def manifest(tensors, shards, boxes):
        return head + sections + "".join(
            f',"{key}":' + json.dumps(value, separators=(",", ":"))
            for key, value in (("tensors", tensors), ("files", shards), ("boxes", boxes)))

    for name, content in {
        "good": manifest(tensors, shards, boxes),
        "empty": manifest({}, [], []),
        "gap": manifest(tensors, shards, boxes[:3] + boxes[4:]),
        "overlap": manifest(tensors, shards, [boxes[0], {**boxes[1], "box": [0, 3, 0, 3]}] + boxes[2:]),
        "outside": manifest(tensors, shards, [{**boxes[0], "box": [0, 2**63 - 1, 0, 6]}]),
        "large": manifest({"a": {**tensors["a.weight"], "shape": [2**62, 2]}}, [], []),
        "up": manifest({}, [{**shards[0], "name": "../x.safetensors"}], []),
        "version": head.replace('"version":1', '"version":2'),
    }.items():
        write("manifest", name, content)

    golden = ROOT.parent.parent / "golden" / "data"
    for case in ("mixtral-1", "qwen2_moe-2", "qwen3_moe-1", "olmoe-1", "deepseek_v2-2", "deepseek_v3-1", "gpt_oss-1",
                 "llama4-2"):
        write("hf_config", case, (golden / case / "config.json").read_bytes())

    def config(model_type, **keys):
        return json.dumps({"model_type": model_type, **keys})

    for name, content in {
        "nested": config("llama4", text_config={"model_type": "llama4_text", "num_local_experts": 2}),
        "unnested": config("llama4", text_config=[]),
        "unknown": config("dbrx"),
        "negative": config("mixtral", hidden_size=-1),
        "huge": config("mixtral", hidden_size=2**63),
        "product": config("mixtral", hidden_size=2**20, intermediate_size=2**20, num_local_experts=2**12),
        "real": config("olmoe", hidden_size=1.5),
        "null": config("deepseek_v3", n_group=None, topk_group=None),
        "layers": config("qwen2_moe", num_hidden_layers=3, mlp_only_layers=[0, 2, 65536]),
        "quantised": config("gpt_oss", quantization_config={"quant_method": "mxfp4"}),
    }.items():
        write("hf_config", name, content)

    def tokens(bin_bytes=10, magic=b"MMIDIDX\0\0", version=1, code=8, lengths=(2, 0, 3),
               pointers=(0, 4, 4), documents=(0, 1, 3), sequences=3):
        return (struct.pack("<H", bin_bytes) + magic +
                struct.pack("<QBQQ", version, code, sequences, len(documents)) +
                struct.pack(f"<{len(lengths)}i", *lengths) +
                struct.pack(f"<{len(pointers)}q", *pointers) +
                struct.pack(f"<{len(documents)}q", *documents))

    for name, content in {
        "good": tokens(),
        "int32": tokens(20, code=4, pointers=(0, 8, 8)),
        "empty": tokens(0, lengths=(), pointers=(), documents=(0,), sequences=0),
        "magic": tokens(magic=b"MMIDIDX\0\1"),
        "large": tokens(sequences=2**63),
        "outside": tokens(lengths=(2, 0, 2**31 - 1)),
        "short": tokens()[:-1],
    }.items():
        write("tokens", name, content)


if __name__ == "__main__":
    main()
