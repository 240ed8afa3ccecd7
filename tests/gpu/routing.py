#!/usr/bin/env python3
"""routing.py FOLDER MODEL [TOKENS ...]: how many experts of each layer a prompt of so many random tokens uses.

Runs the llama-imatrix of FOLDER (its own libraries beside it), which counts uses of each expert, over random text, and prints the least,
the mean and the most of distinct experts over the layers. For the models of synth_moe.py: their routing must look like that of a real model
in prompts, or figures about prompts say nothing.
"""
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's plain types
STRING, ARRAY = 8, 9


class Reader:
    """The little of GGUF that llama-imatrix writes."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        value = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value[0]

    def text(self):
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length:self.at].decode(errors="replace")

    def skip(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            inner, count = self.take("I"), self.take("Q")
            for _ in range(count):
                self.skip(inner)
        else:
            self.at += SIZES[kind]


def counts(path):
    """Uses of each expert by tensor of experts."""
    reader = Reader(path.read_bytes())
    reader.at = 8
    tensors, keys = reader.take("Q"), reader.take("Q")
    for _ in range(keys):
        reader.text()
        reader.skip(reader.take("I"))
    listed = []
    for _ in range(tensors):
        name, dimensions = reader.text(), reader.take("I")
        shape = [reader.take("Q") for _ in range(dimensions)]
        reader.take("I")
        listed.append((name, shape, reader.take("Q")))
    base = -(-reader.at // 32) * 32
    return {name: struct.unpack_from(f"<{shape[-1]}f", reader.data, base + offset)
            for name, shape, offset in listed if name.endswith("exps.weight.counts")}


def distinct(folder, model, tokens, threads=2, environment=None):
    """Distinct experts of each layer in one prompt of random tokens."""
    with tempfile.TemporaryDirectory() as place:
        text, out = pathlib.Path(place) / "text", pathlib.Path(place) / "counts.gguf"
        rng = random.Random(tokens)
        text.write_text("".join(chr(rng.randrange(33, 127)) for _ in range(4 * tokens + 64)))
        arguments = [folder / "llama-imatrix", "-m", model, "-f", text, "-o", out, "--chunks", 1, "-c", tokens, "-b", tokens, "-ub", tokens,
                     "-t", threads, "-ngl", 0, "--no-ppl"]
        done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, errors="replace", check=False,
                              env={**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})}, timeout=300)
        if done.returncode != 0:
            sys.exit(f"llama-imatrix: exit status {done.returncode}\n{done.stderr[-2000:]}")
        found = {}
        for name, uses in counts(out).items():
            found[int(re.search(r"blk\.(\d+)\.", name)[1])] = sum(use > 0 for use in uses)
        return [found[layer] for layer in sorted(found)]


def main():
    folder, model = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    for tokens in map(int, sys.argv[3:] or ("16", "64", "512")):
        layers = distinct(folder, model, tokens)
        print(json.dumps({"tokens": tokens, "least": min(layers), "mean": round(sum(layers) / len(layers), 1), "most": max(layers),
                          "layers": layers}))


if __name__ == "__main__":
    main()
