#!/usr/bin/env python3
"""Writes a mixture-of-experts GGUF of a given shape with random weights: its speed is real, its language is not.

--arch chooses the architecture and the defaults of the shape:
  qwen3moe     a 30B-A3B model: 48 layers, 128 experts, 8 used, Q4_K, 16.3 GiB
  gpt-oss      8 layers of a model of that family: 128 experts, 4 used, MXFP4, biases, 13.6 GiB
  deepseek2    9 layers, the first dense: 256 experts, 8 used, Q4_K, a shared expert, compressed keys and values, 14.4 GiB
  glm53-layer  the same architecture, one dense layer and two of 288 experts of 8.3 MB as GLM 5.3 has them, 5.2 GiB

Routing: a token's embedding is large beside what the layers add, so that a router reads the token, and tokens differ; a part of each
embedding is the same for all tokens, so that some experts are used more than others. A prompt of 64 random tokens then uses about
100 of 128 experts in each layer, as many as real models do (routing.py counts them). Nothing but Python itself is needed.
"""
import argparse
import array
import math
import random
import struct

TYPES = {"f32": (0, 1, 4), "q8_0": (8, 32, 34), "q4_K": (12, 256, 144), "mxfp4": (39, 32, 17)}  # number in GGUF, values and bytes of a block
ALIGNMENT = 32
TILE_BLOCKS = 1 << 16  # distinct blocks; each tensor begins at another: random enough, and written at memory speed
TILE_FLOATS = 1_000_003  # no multiple of a row, so that no two rows are equal
U32, F32, STRING, ARRAY, I32, BOOL = 4, 6, 8, 9, 5, 7
SHAPES = {
    "qwen3moe": {"layers": 48, "embd": 2048, "ff": 768, "experts": 128, "used": 8, "heads": 32, "kv": 4, "hd": 128},
    "gpt-oss": {"layers": 8, "embd": 2880, "ff": 2880, "experts": 128, "used": 4, "heads": 64, "kv": 8, "hd": 64},
    # heads of hd + rope values, out of ranks q_rank and kv_rank
    "deepseek2": {"layers": 9, "embd": 4096, "ff": 1024, "experts": 256, "used": 8, "heads": 32, "kv": 1, "hd": 128, "rope": 64,
                  "q_rank": 1536, "kv_rank": 512, "dense": 1, "dense_ff": 8192},
    "glm53-layer": {"layers": 3, "embd": 3840, "ff": 1280, "experts": 288, "used": 8, "heads": 32, "kv": 1, "hd": 128, "rope": 64,
                    "q_rank": 1536, "kv_rank": 512, "dense": 1, "dense_ff": 8192},
}
ARCHITECTURES = {"glm53-layer": "deepseek2"}  # of shapes that have another name
COMMON_SHARE = 0.25  # of an embedding's energy: the same for all tokens
# What a product of weights makes of inputs of size 1. What is added to the embedding (of size 1) is small.
GAINS = {"attn_output": 0.1, "ffn_down_exps": 0.5, "ffn_down_shexp": 0.2, "ffn_down": 0.2}
SPREADS = {"sinks": 1.0, "exp_probs_b": 0.02}  # of single numbers; others 0.1
DEVIATIONS = {"q4_K": 257.0, "q8_0": 73.9}  # of the numbers that random bytes stand for, before the scale
COMMON = {"vocab": 32768, "ctx": 131072, "seed": 1}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--arch", choices=SHAPES, default="qwen3moe")
    names = {name for shape in SHAPES.values() for name in shape} | set(COMMON)
    for name in sorted(names):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    a = parser.parse_args()
    for name, default in {**SHAPES[a.arch], **COMMON}.items():
        if getattr(a, name) is None:
            setattr(a, name, default)
    a.arch = ARCHITECTURES.get(a.arch, a.arch)
    least = len(vocabulary(0)[0])
    if a.vocab < least:
        parser.error(f"--vocab {a.vocab}: a vocabulary has {least} tokens at least")
    return a


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
    numbers = lambda items: struct.pack("<IQ", I32, len(items)) + array.array("i", items).tobytes()
    u32, f32 = lambda value: struct.pack("<I", value), lambda value: struct.pack("<f", value)
    p = a.arch + "."
    shape = {"block_count": a.layers, "context_length": a.ctx, "embedding_length": a.embd, "feed_forward_length": a.ff,
             "attention.head_count": a.heads, "attention.head_count_kv": a.kv, "attention.key_length": a.hd,
             "attention.value_length": a.hd, "expert_count": a.experts, "expert_used_count": a.used,
             "expert_feed_forward_length": a.ff}
    more = []
    if a.arch == "gpt-oss":
        shape["attention.sliding_window"] = 128
    if a.arch == "deepseek2":
        # What the cache holds of a token: the compressed part and the rotated one.
        shape |= {"feed_forward_length": a.dense_ff, "attention.key_length": a.kv_rank + a.rope, "attention.value_length": a.kv_rank,
                  "attention.key_length_mla": a.hd + a.rope, "attention.value_length_mla": a.hd, "attention.q_lora_rank": a.q_rank,
                  "attention.kv_lora_rank": a.kv_rank, "rope.dimension_count": a.rope, "leading_dense_block_count": a.dense,
                  "expert_shared_count": 1, "expert_gating_func": 2}
        more = [(p + "expert_weights_scale", F32, f32(2.5)), (p + "expert_weights_norm", BOOL, b"\1")]
    return [
        ("general.architecture", STRING, text(a.arch)), ("general.name", STRING, text("synthetic-moe")),
        *((p + name, U32, u32(value)) for name, value in shape.items()),
        (p + "attention.layer_norm_rms_epsilon", F32, f32(1e-6)), (p + "rope.freq_base", F32, f32(1e6)), *more,
        ("tokenizer.ggml.model", STRING, text("gpt2")), ("tokenizer.ggml.pre", STRING, text("default")),
        ("tokenizer.ggml.tokens", ARRAY, strings(tokens)), ("tokenizer.ggml.token_type", ARRAY, numbers(kinds)),
        ("tokenizer.ggml.merges", ARRAY, strings(merges)),
        ("tokenizer.ggml.eos_token_id", U32, u32(specials + 2)), ("tokenizer.ggml.bos_token_id", U32, u32(specials)),
    ]


def attention(a, blk):
    yield blk + "attn_norm.weight", "f32", (a.embd,)
    if a.arch == "deepseek2":
        yield blk + "attn_q_a.weight", "q8_0", (a.embd, a.q_rank)
        yield blk + "attn_q_a_norm.weight", "f32", (a.q_rank,)
        yield blk + "attn_q_b.weight", "q8_0", (a.q_rank, a.heads * (a.hd + a.rope))
        yield blk + "attn_kv_a_mqa.weight", "q8_0", (a.embd, a.kv_rank + a.rope)
        yield blk + "attn_kv_a_norm.weight", "f32", (a.kv_rank,)
        yield blk + "attn_k_b.weight", "q8_0", (a.hd, a.kv_rank, a.heads)
        yield blk + "attn_v_b.weight", "q8_0", (a.kv_rank, a.hd, a.heads)
    else:
        yield blk + "attn_q.weight", "q8_0", (a.embd, a.heads * a.hd)
        yield blk + "attn_k.weight", "q8_0", (a.embd, a.kv * a.hd)
        yield blk + "attn_v.weight", "q8_0", (a.embd, a.kv * a.hd)
    yield blk + "attn_output.weight", "q8_0", (a.heads * a.hd, a.embd)
    if a.arch == "qwen3moe":
        yield blk + "attn_q_norm.weight", "f32", (a.hd,)
        yield blk + "attn_k_norm.weight", "f32", (a.hd,)
    if a.arch == "gpt-oss":
        yield blk + "attn_output.bias", "f32", (a.embd,)
        yield blk + "attn_sinks.weight", "f32", (a.heads,)
        yield blk + "post_attention_norm.weight", "f32", (a.embd,)
    else:
        yield blk + "ffn_norm.weight", "f32", (a.embd,)


def feed_forward(a, blk, layer):
    if a.arch == "deepseek2" and layer < a.dense:
        yield blk + "ffn_gate.weight", "q8_0", (a.embd, a.dense_ff)
        yield blk + "ffn_up.weight", "q8_0", (a.embd, a.dense_ff)
        yield blk + "ffn_down.weight", "q8_0", (a.dense_ff, a.embd)
        return
    kind = "mxfp4" if a.arch == "gpt-oss" else "q4_K"
    yield blk + "ffn_gate_inp.weight", "f32", (a.embd, a.experts)
    yield blk + "ffn_gate_exps.weight", kind, (a.embd, a.ff, a.experts)
    yield blk + "ffn_up_exps.weight", kind, (a.embd, a.ff, a.experts)
    yield blk + "ffn_down_exps.weight", kind, (a.ff, a.embd, a.experts)
    if a.arch == "gpt-oss":
        yield blk + "ffn_gate_inp.bias", "f32", (a.experts,)
        yield blk + "ffn_gate_exps.bias", "f32", (a.ff, a.experts)
        yield blk + "ffn_up_exps.bias", "f32", (a.ff, a.experts)
        yield blk + "ffn_down_exps.bias", "f32", (a.embd, a.experts)
    if a.arch == "deepseek2":
        yield blk + "exp_probs_b.bias", "f32", (a.experts,)
        yield blk + "ffn_gate_shexp.weight", "q8_0", (a.embd, a.ff)
        yield blk + "ffn_up_shexp.weight", "q8_0", (a.embd, a.ff)
        yield blk + "ffn_down_shexp.weight", "q8_0", (a.ff, a.embd)


def tensors(a):
    yield "token_embd.weight", "q8_0", (a.embd, a.vocab)
    yield "output_norm.weight", "f32", (a.embd,)
    yield "output.weight", "q8_0", (a.embd, a.vocab)
    for layer in range(a.layers):
        blk = f"blk.{layer}."
        yield from attention(a, blk)
        yield from feed_forward(a, blk, layer)


def byte_size(kind, shape):
    _, values, size = TYPES[kind]
    return math.prod(shape) // values * size


def blocks(rng, kind, inputs, gain):
    """Blocks of random bytes behind scales, so that a sum over so many inputs of size 1 has the size `gain`."""
    size, wanted = TYPES[kind][2], gain / math.sqrt(inputs)
    tile = bytearray(rng.randbytes(TILE_BLOCKS * size))
    if kind == "mxfp4":  # one exponent
        middle = 126 + round(math.log2(wanted))
        tile[0::size] = bytes(rng.choices((middle - 1, middle, middle), k=TILE_BLOCKS))
        return tile
    scale = wanted / DEVIATIONS[kind]
    for i, value in enumerate({"q4_K": (scale, 7.5 * scale), "q8_0": (scale,)}[kind]):  # the second: the mean is 0
        low, high = struct.pack("<e", value)
        tile[2 * i::size], tile[2 * i + 1::size] = bytes([low]) * TILE_BLOCKS, bytes([high]) * TILE_BLOCKS
    return tile


def write_from(out, tile, start, size):
    view = memoryview(tile)
    while size > 0:
        piece = view[start:start + size]
        out.write(piece)
        size -= len(piece)
        start = 0


def write_embeddings(out, rng, tile, kind, shape):
    """Each row begins with the blocks that all rows share; the others are its own."""
    _, values, size = TYPES[kind]
    count = shape[0] // values
    shared = max(round(COMMON_SHARE * count), 1)
    common, own = bytes(tile[:shared * size]), count - shared
    for _ in range(shape[1]):
        start = rng.randrange(TILE_BLOCKS - own)
        out.write(common)
        out.write(tile[start * size:(start + own) * size])


def write_tensor(out, rng, tiles, name, kind, shape):
    size = byte_size(kind, shape)
    if kind != "f32":
        part = name.removesuffix(".weight").split(".")[-1]
        embeds = part == "token_embd"
        key = (kind, 1 if embeds else shape[0], GAINS.get(part, 1.0))
        if key not in tiles:
            tiles[key] = blocks(rng, *key)
        if embeds:
            write_embeddings(out, rng, tiles[key], kind, shape)
        else:
            write_from(out, tiles[key], rng.randrange(TILE_BLOCKS) * TYPES[kind][2], size)
    elif "norm" in name:
        out.write(struct.pack("<f", 1.0) * math.prod(shape))
    else:
        spread = next((size for part, size in SPREADS.items() if part in name), 0.1)
        spread = 1 / math.sqrt(shape[0]) if name.endswith("gate_inp.weight") else spread
        start = rng.randrange(TILE_FLOATS)
        if spread not in tiles:
            tiles[spread] = array.array("f", (spread * value for value in tiles["f32"])).tobytes()
        write_from(out, tiles[spread], 4 * start, size)


def main():
    a = arguments()
    rng = random.Random(a.seed)
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
        tiles = {"f32": [rng.gauss(0.0, 1.0) for _ in range(TILE_FLOATS)]}
        for (name, kind, shape), start in zip(listed, offsets):
            out.write(bytes(base + start - out.tell()))
            write_tensor(out, rng, tiles, name, kind, shape)
        out.write(bytes(base + offset - out.tell()))
    print(f"{a.output}: {offset >> 20} MiB")


main()
