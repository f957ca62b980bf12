"""Compiles every shipped kernel configuration for NVIDIA GPUs without having one, and checks what came out.

    python tests/kernels/compile_kernels.py 90          # a table; the exit status is the number of failures
    python tests/kernels/compile_kernels.py 90 --first  # the first configuration of each kernel alone

A configuration fails if registers spill (a stack frame, or local memory), if it needs more shared memory than a block
can have, if products are fused with sums where that is switched off, if anywhere the difference that an exp2 takes is
fused with a product (z - max must be 0 at the maximum), if the loop of the statistics waits for other threads, if a
kernel on padded rows does not access vectors, or if a kernel with a matrix product has lost the architecture's own
instruction for it (HGMMA on sm_90; attention of one query has too few rows for it). One pass of the statistics' loop is
16 elements per thread.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkit.kernels.decode import triton as decode
from rlkit.kernels.linear_logp import triton as row_kernels
from rlkit.kernels.linear_scan import triton as scan

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of one block
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ALIGNED = (
    "num_columns",
    "x_stride",
    "stats_stride",
    "out_stride",
    "terms_stride",
    "num_tokens",
    "slot_stride",
    "head_stride",
)


def configurations() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, types of the run-time arguments, constants, options) of all that the package launches.

    A name that ends in "odd" is of rows whose length no power of two divides; "padded" ones begin at multiples of 16.
    """
    rows = [*statistics(), *gradients()]
    chosen = ("stats bf16 False", "gradient fp32 bf16 False")
    odd = [(f"{name} odd", k, t, constants | {"VECTOR": 1}, o) for name, k, t, constants, o in rows if name in chosen]
    vectors = [(f"{name} padded", *rest) for name, *rest in statistics() if name.startswith("stats fp32")]
    vectors += [(f"{name} padded", k, t, constants | {"VECTOR": 16}, o)
                for name, k, t, constants, o in gradients() if name.startswith("gradient fp32")]  # fmt: skip
    return [*rows, *odd, *vectors, *scans(), *decoding()]


def statistics() -> list[Any]:
    out = []
    for dtype, full in product(("fp32", "bf16", "fp16"), (False, True)):
        types = {
            "x_ptr": f"*{dtype}",
            "bias_ptr": "*fp32",
            "targets_ptr": "*i64",
            "mask_ptr": "*i1",
            "stats_ptr": "*fp32",
            "scale": "fp32",
            "softcap": "fp32",
        }
        constants = {"HAS_BIAS": full, "HAS_MASK": full, "HAS_SOFTCAP": full, "ROWS": row_kernels.ROWS}
        constants["VECTOR"] = 4 if dtype == "fp32" else 8
        constants |= {} if full else {"bias_ptr": None, "mask_ptr": None}
        out.append(
            _with_options(f"stats {dtype} {full}", row_kernels.stats_kernel, types, constants, row_kernels.STATS)
        )
    return out


def gradients() -> list[Any]:
    out = []
    pairs = [("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16"), ("fp16", "fp16")]
    for (source, target), full in product(pairs, (False, True)):
        types = {
            "x_ptr": f"*{source}",
            "bias_ptr": "*fp32",
            "targets_ptr": "*i64",
            "alive_ptr": "*i1",
            "terms_ptr": "*fp32",
            "out_ptr": f"*{target}",
            "scale": "fp32",
            "softcap": "fp32",
        }
        flags = ("HAS_BIAS", "HAS_ALIVE", "HAS_SOFTCAP", "HAS_ENTROPY")
        constants = dict.fromkeys(flags, full) | {"ROWS": row_kernels.ROWS, "VECTOR": 1}
        constants |= {} if full else {"bias_ptr": None, "alive_ptr": None}
        name = f"gradient {source} {target} {full}"
        out.append(_with_options(name, row_kernels.gradient_kernel, types, constants, row_kernels.GRADIENT))
    return out


def scans() -> list[Any]:
    pointers = ("a_ptr", "b_ptr", "ends_ptr", "carry_ptr", "out_ptr", "x_ptr", "d_a_ptr")
    types = dict.fromkeys(pointers, "*fp32") | {"last_ptr": "*i8", "cu_ptr": "*i64"}
    options = {"num_warps": scan.NUM_WARPS}
    out = [("mark", scan.mark_kernel, types, {"BOUNDS": scan.BOUNDS}, {})]
    for reverse in (True, False):
        constants = {"REVERSE": reverse, "CARRIES": scan.CARRIES}
        out.append((f"carry {reverse}", scan.carry_kernel, types, constants, options))
        for gradient in (True, False):
            constants = {"REVERSE": reverse, "SHIFTED": gradient, "BLOCK": scan.BLOCK}
            out.append((f"reduce {reverse} {gradient}", scan.reduce_kernel, types, constants, options))
            last = {"GRADIENT": gradient} | ({} if gradient else {"x_ptr": None, "d_a_ptr": None})
            out.append((f"apply {reverse} {gradient}", scan.apply_kernel, types, constants | last, options))
    return out


def decoding() -> list[Any]:
    """The kernels of a decoding step, at the shapes of Qwen2.5 0.5B, 1.5B and 7B, and of Qwen3 0.6B."""
    out = []
    models = {"0.5B": (2, 7, 64, 896), "1.5B": (2, 6, 128, 1536), "7B": (4, 7, 128, 3584), "Qwen3": (8, 2, 128, 1024)}
    pointers = dict.fromkeys(("cos_ptr", "sin_ptr", "stats_ptr"), "*fp32") | {"positions_ptr": "*i64", "eps": "fp32"}
    for model, (kv, group, dim, width) in models.items():
        tensors = ("qkv_ptr", "q_ptr", "keys_ptr", "values_ptr", "y_ptr", "out_ptr")
        types = dict.fromkeys(tensors, "*bf16") | pointers | {"scale": "fp32", "x_ptr": "*fp32", "slots_ptr": "*i64"}
        types |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "weight_ptr"), "*fp32")
        norm = model == "Qwen3"
        constants = {"HEADS": kv * group, "KV": kv, "HALF": dim // 2, "HAS_NORM": norm, "HAS_SLOTS": norm}
        constants |= {} if norm else {"q_norm_ptr": None, "k_norm_ptr": None, "slots_ptr": None}
        out.append(_with_options(f"rotate {model}", decode.rotate_kernel, types, constants, decode.ROTATE))
        for splits in (1, 8):
            parts = {"parts_ptr": "*bf16" if splits == 1 else "*fp32"}
            constants = {"KV": kv, "GROUP": group, "PADDED": 16, "D": dim, "SPLITS": splits, "EXACT": False}
            constants |= {"HAS_SLOTS": norm} | ({} if norm else {"slots_ptr": None})
            attend = f"attend {model} {splits}", decode.attend_kernel, types | parts, constants
            out.append(_with_options(*attend, decode.ATTEND))
        merge = types | {"parts_ptr": "*fp32"}
        out.append(_with_options(f"merge {model}", decode.merge_kernel, merge, {"D": dim, "SPLITS": 8}, decode.MERGE))
        constants = {"DIM": width, "BLOCK": triton.next_power_of_2(width), "HAS_SUM": True}
        out.append(_with_options(f"norm {model}", decode.norm_kernel, types, constants, decode.NORM))
        out.append(_with_options(f"silu {model}", decode.silu_kernel, types | {"x_ptr": "*bf16"}, {}, decode.SILU))
    sums = {"x_ptr": "*fp32", "peaks_ptr": "*fp32", "out_ptr": "*fp64"}
    for exp in (False, True):
        constants = {"SIZE": 256, "EXP": exp} | ({} if exp else {"peaks_ptr": None})
        out.append(_with_options(f"sums exp={exp}", decode.sums_kernel, sums, constants, decode.SUMS))
    return out


def _with_options(name: str, kernel: Any, types: Any, constants: dict[str, Any], config: dict[str, int]) -> Any:
    """A configuration whose upper-case entries are constants, the others options of the compiler."""
    upper = {k: v for k, v in config.items() if k.isupper()}
    return name, kernel, types, constants | upper, {k: v for k, v in config.items() if not k.isupper()}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int], arch: int, *, name: str
) -> Any:
    """The kernel as launched on tensors that start at multiples of 16; the name says which sizes are none."""
    unaligned = ALIGNED if name.endswith(" odd") else ("num_columns",) if name.endswith(" padded") else ()
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [
        n not in constants and (signature[n].startswith("*") or (n in ALIGNED and n not in unaligned)) for n in names
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, yes in enumerate(aligned) if yes},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def faults(binary: Any, arch: int, *, few_rows: bool = False) -> tuple[list[str], str]:
    """What is wrong with a compiled kernel, and its resources in words. `few_rows`: of its products, below 64."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}
    shared = binary.metadata.shared
    wrong = [f"{k} {found[k]}" for k in ("STACK", "LOCAL") if found[k]]
    wrong += [f"shared memory {shared} > {SHARED_BYTES[arch]}"] if shared > SHARED_BYTES[arch] else []
    if not binary.metadata.enable_fp_fusion and "fma.rn" in binary.asm["ptx"]:
        wrong.append("fused multiply-add")
    wrong += ["an exponent's difference is fused"] if fused_differences(binary.asm["ptx"]) else []
    if "tt.dot" in binary.asm["ttir"] and arch == 90 and "wgmma" not in binary.asm["ptx"] and not few_rows:
        wrong.append("no HGMMA")
    return wrong, f"{found['REG']:4} registers, {shared:7} bytes shared"


def fused_differences(ptx: str) -> bool:
    """Whether an exp2 takes a difference that is fused with the product before it, or could be by the assembler."""
    written: dict[str, list[tuple[str, list[str]]]] = {}
    for op, line in re.findall(r"^\s*(?:@\S+\s+)?([a-z][\w.]*)\s+([^;]*%[^;]*);", ptx, re.MULTILINE):
        names, num = re.findall(r"%\w+", line), 2 if line.startswith("{") else 1
        for name in names[:num]:
            written.setdefault(name, []).append((op.split(".")[0], names[num:]))

    def sources(name: str, seen: frozenset[str] = frozenset()) -> list[tuple[str, list[str]]]:
        """What wrote a register, seen through copies."""
        out = []
        for op, args in [] if name in seen else written.get(name, []):
            out += [x for arg in args for x in sources(arg, seen | {name})] if op == "mov" else [(op, args)]
        return out

    exponents = [args[0] for defs in written.values() for op, args in defs if op == "ex2"]
    scaled = [
        x for name in exponents for op, args in sources(name) if op == "mul" for arg in args for x in sources(arg)
    ]
    direct = [x for name in exponents for x in sources(name)]
    terms = [x for op, args in scaled if op in ("sub", "add") for arg in args for x in sources(arg)]
    return any(op == "fma" for op, _ in direct + scaled) or any(op == "mul" for op, _ in terms)


def loop(binary: Any) -> tuple[int, int]:
    """Machine instructions and block barriers of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL.with_name("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True)
    ops: list[str] = []
    labels: dict[str, int] = {}
    longest: list[str] = []
    for line in text.stdout.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(ops)
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            ops.append(code[1])
            back = re.search(r"BRA.*`\((\.L_\w+)\)", code[1])
            if back and back[1] in labels:
                longest = max(longest, ops[labels[back[1]] :], key=len)
    return len(longest), sum("BAR." in op for op in longest)


def main() -> None:
    failures, first, rows = 0, "--first" in sys.argv, configurations()
    rows = list({row[1].__name__: row for row in reversed(rows)}.values())[::-1] if first else rows
    for arch in (int(x) for x in sys.argv[1:] if x != "--first"):
        for name, kernel, types, constants, options in rows:
            binary = compiled(kernel, types, constants, options, arch, name=name)
            wrong, resources = faults(binary, arch, few_rows=name.startswith("attend"))
            vector = r"ld\.global\S*\.v4" if name.startswith("stats") else r"st\.global\.v4\.b32"
            if name.endswith(" padded") and not re.search(vector, binary.asm["ptx"]):
                wrong.append("no vectors")
            if name.startswith("stats"):  # the disassembler takes half a second to start
                length, barriers = loop(binary)
                wrong += ["a barrier in the loop"] if barriers else []
                resources += f", {length:4} instructions in the loop"
            failures += bool(wrong)
            print(f"sm_{arch:<4}{name:28}{resources}  {'; '.join(wrong) or 'ok'}", flush=True)
    print(f"{failures} failures")
    sys.exit(min(failures, 100))


if __name__ == "__main__":
    main()
