#!/usr/bin/env python3
"""Compiles kernels/*.cu to PTX with NVRTC. Called by kernels.sh: kernels.py LIBNVRTC KERNELS_FOLDER OUTPUT_FOLDER"""
import ctypes
import pathlib
import re
import sys

TARGET = "compute_75"  # the oldest card served; newer ones compile the same PTX when it is loaded
NEWEST_ISA = (8, 4)    # what driver release 550 reads


class Compiler:
    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(status).decode()}")

    def text(self, what, program):
        """One of NVRTC's texts (ProgramLog, PTX): its size is asked first and counts the final NUL."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, source, headers):
        program = ctypes.c_void_p()
        strings = lambda items: (ctypes.c_char_p * len(items))(*[item.encode() for item in items])
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers),
                  strings([header.read_text() for header in headers]), strings([header.name for header in headers]))
        options = [f"--gpu-architecture={TARGET}", "--std=c++17", "--fmad=true"]
        try:
            self.call("nvrtcCompileProgram", program, len(options), strings(options))
        except RuntimeError as error:
            sys.exit(f"kernels: {source.name}: {error}\n{self.text('ProgramLog', program)}")
        # NVRTC of this release knows no "warnings are errors".
        if log := self.text("ProgramLog", program).strip():
            sys.exit(f"kernels: {source.name}: warnings:\n{log}")
        ptx = self.text("PTX", program)
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx


def checked(name, source, ptx):
    """The PTX without the compiler's own comments, after checking what drivers and the launch code rely on."""
    isa = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.M)
    if isa is None or tuple(map(int, isa.groups())) > NEWEST_ISA:
        sys.exit(f"kernels: {name}: PTX ISA {isa and isa[0]} is newer than {NEWEST_ISA[0]}.{NEWEST_ISA[1]}")
    if re.search(rf"^\.target {TARGET.replace('compute', 'sm')}$", ptx, re.M) is None:
        sys.exit(f"kernels: {name}: not compiled for {TARGET}")
    entries = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.M)
    wanted = re.findall(r"^(moe_k_\w+)\(", source, re.M)
    if sorted(entries) != sorted(wanted) or not entries:
        sys.exit(f"kernels: {name}: entry points {entries}, but the source defines {wanted}")
    body = ptx[ptx.index(".version"):].rstrip() + "\n"
    return entries, body


def main():
    library, kernels, output = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    compiler = Compiler(library)
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    headers = sorted(kernels.glob("*.cuh"))
    for source in sorted(kernels.glob("*.cu")):
        entries, body = checked(source.name, source.read_text(), compiler.compile(source, headers))
        head = (f"// From kernels/{source.name} by tests/gen/kernels.sh (NVRTC {major.value}.{minor.value}, {TARGET}); do not edit.\n")
        (output / f"{source.stem}.ptx").write_text(head + body)
        print(f"kernels: {source.name}: {', '.join(entries)}", file=sys.stderr)


main()
