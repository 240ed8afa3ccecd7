#!/usr/bin/env python3
"""Writes a mixture-of-experts GGUF (qwen3moe) of a given shape with random weights: its speed is real, its language is not.

The defaults are the shape of a 30B-A3B model: 48 layers, 128 experts, 8 used, Q4_K experts, 16.3 GiB. Needs numpy.
"""
import argparse
import struct

import numpy as np

TYPES = {"f32": (0, 1, 4), "q8_0": (8, 32, 34), "q4_K": (12, 256, 144)}  # number in GGUF, values and bytes of a block
ALIGNMENT = 32
TILE_BLOCKS = 1 << 16  # distinct Q4_K blocks (9.4 MB), rolled for each tensor: random enough, and written at memory speed
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    shape = {"layers": 48, "embd": 2048, "ff": 768, "experts": 128, "used": 8, "heads": 32, "kv": 4, "hd": 128,
             "vocab": 32768, "ctx": 131072, "seed": 1}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def vocabulary(size):
    """A byte-level BPE vocabulary as small as llama.cpp accepts: 256 bytes, pairs of letters, three specials, fillers."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    tokens = [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(hidden))]
    merges = []
    letters = "etaoinshrdlcumwfgypbvk"
    for first in letters:
        for second in letters:
            tokens.append(first + second)
            merges.append(f"{first} {second}")
    specials = len(tokens)
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * specials + [3] * 3
    while len(tokens) < size:
        tokens.append(f"<f{len(tokens)}>")
        kinds.append(1)
    return tokens, kinds, merges, specials


def metadata(a):
    tokens, kinds, merges, specials = vocabulary(a.vocab)
    strings = lambda items: struct.pack("<IQ", STRING, len(items)) + b"".join(map(text, items))
    numbers = lambda items: struct.pack("<IQ", I32, len(items)) + np.array(items, "<i4").tobytes()
    u32, f32 = lambda value: struct.pack("<I", value), lambda value: struct.pack("<f", value)
    p = "qwen3moe."
    return [
        ("general.architecture", STRING, text("qwen3moe")), ("general.name", STRING, text("synthetic-moe")),
        (p + "block_count", U32, u32(a.layers)), (p + "context_length", U32, u32(a.ctx)),
        (p + "embedding_length", U32, u32(a.embd)), (p + "feed_forward_length", U32, u32(a.ff)),
        (p + "attention.head_count", U32, u32(a.heads)), (p + "attention.head_count_kv", U32, u32(a.kv)),
        (p + "attention.key_length", U32, u32(a.hd)), (p + "attention.value_length", U32, u32(a.hd)),
        (p + "attention.layer_norm_rms_epsilon", F32, f32(1e-6)), (p + "rope.freq_base", F32, f32(1e6)),
        (p + "expert_count", U32, u32(a.experts)), (p + "expert_used_count", U32, u32(a.used)),
        (p + "expert_feed_forward_length", U32, u32(a.ff)),
        ("tokenizer.ggml.model", STRING, text("gpt2")), ("tokenizer.ggml.pre", STRING, text("default")),
        ("tokenizer.ggml.tokens", ARRAY, strings(tokens)), ("tokenizer.ggml.token_type", ARRAY, numbers(kinds)),
        ("tokenizer.ggml.merges", ARRAY, strings(merges)),
        ("tokenizer.ggml.eos_token_id", U32, u32(specials + 2)), ("tokenizer.ggml.bos_token_id", U32, u32(specials)),
    ]


def tensors(a):
    yield "token_embd.weight", "q8_0", (a.embd, a.vocab)
    yield "output_norm.weight", "f32", (a.embd,)
    yield "output.weight", "q8_0", (a.embd, a.vocab)
    for layer in range(a.layers):
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", "f32", (a.embd,)
        yield blk + "attn_q.weight", "q8_0", (a.embd, a.heads * a.hd)
        yield blk + "attn_k.weight", "q8_0", (a.embd, a.kv * a.hd)
        yield blk + "attn_v.weight", "q8_0", (a.embd, a.kv * a.hd)
        yield blk + "attn_output.weight", "q8_0", (a.heads * a.hd, a.embd)
        yield blk + "attn_q_norm.weight", "f32", (a.hd,)
        yield blk + "attn_k_norm.weight", "f32", (a.hd,)
        yield blk + "ffn_norm.weight", "f32", (a.embd,)
        yield blk + "ffn_gate_inp.weight", "f32", (a.embd, a.experts)
        yield blk + "ffn_gate_exps.weight", "q4_K", (a.embd, a.ff, a.experts)
        yield blk + "ffn_up_exps.weight", "q4_K", (a.embd, a.ff, a.experts)
        yield blk + "ffn_down_exps.weight", "q4_K", (a.ff, a.embd, a.experts)


def byte_size(kind, shape):
    _, values, size = TYPES[kind]
    return int(np.prod(shape, dtype=np.int64)) // values * size


def random_blocks(rng, count, size, *scales):
    """Blocks of random bytes that start with the given half-precision scales, small enough to keep activations finite."""
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for i, scale in enumerate(scales):
        blocks[:, 2 * i:2 * i + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks


def write_tensor(out, rng, tile, name, kind, shape):
    size = byte_size(kind, shape)
    if kind == "q4_K":
        data = memoryview(np.roll(tile, int(rng.integers(TILE_BLOCKS)), axis=0).tobytes())
        while size > 0:
            piece = min(size, len(data))
            out.write(data[:piece])
            size -= piece
    elif kind == "q8_0":
        out.write(random_blocks(rng, size // 34, 34, 2.7e-4).tobytes())
    elif name.endswith("gate_inp.weight"):
        out.write((rng.standard_normal(shape[::-1], dtype=np.float32) / np.float32(np.sqrt(shape[0]))).tobytes())
    else:
        out.write(np.ones(shape, np.float32).tobytes())


def main():
    a = arguments()
    rng = np.random.default_rng(a.seed)
    records, offsets, offset = b"", [], 0
    listed = list(tensors(a))
    for name, kind, shape in listed:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        records += text(name) + dimensions + struct.pack("<IQ", TYPES[kind][0], offset)
        offsets.append(offset)
        offset += -(-byte_size(kind, shape) // ALIGNMENT) * ALIGNMENT
    keys = metadata(a)
    with open(a.output, "wb", buffering=1 << 22) as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys)))
        for key, kind, value in keys:
            out.write(text(key) + struct.pack("<I", kind) + value)
        out.write(records)
        out.write(bytes(-out.tell() % ALIGNMENT))
        base = out.tell()
        tile = random_blocks(rng, TILE_BLOCKS, 144, 1e-4, 7.5e-4)
        for (name, kind, shape), start in zip(listed, offsets):
            out.write(bytes(base + start - out.tell()))
            write_tensor(out, rng, tile, name, kind, shape)
        out.write(bytes(base + offset - out.tell()))
    print(f"{a.output}: {offset >> 20} MiB")


main()
