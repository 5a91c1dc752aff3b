"""A recorded call as a program for 64-bit ARM: translated by LLVM, linked by a cross compiler, run by qemu."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import torch

from tools.aarch64.recorded import Call

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CPU = "neoverse-n1"
"""A processor with NEON and no wider vectors, as in laptops."""
_MAIN = """
#include <stdio.h>
extern void replay(void);
char arena[{size}] __attribute__((aligned(4096)));
int main(int count, char **names) {{
    FILE *file = fopen(names[1], "rb");
    if (!file || fread(arena, 1, sizeof arena, file) != sizeof arena) return 2;
    fclose(file);
    replay();
    file = fopen(names[2], "wb");
    if (!file || fwrite(arena, 1, sizeof arena, file) != sizeof arena || fclose(file)) return 3;
    return 0;
}}
"""
_VECTOR = re.compile(
    r"^\s+(fmla|fmls|fmul|fadd|fsub|mul|mla|smull2?|smlal2?|umull2?|saddlp)\s+v\d+\.\d+[sdh]", re.MULTILINE
)
_SCALAR = re.compile(r"^\s+(fmadd|fmsub|fnmsub|fmul|fadd|fsub|fdiv)\s+[sd]\d+", re.MULTILINE)


_DEFINITION = r"^define [^@]*i32 @(\"?[^(]*_ZN7recurra[^(]*)\(ptr[^,]*,\s*ptr[^,]*,?([^)]*)\)"
"""Numba's form of a function: where results and errors go, then the arguments."""


def _places(call: Call) -> dict[int, int]:
    """Where each region lies in the arena, with room between them for reads ahead."""
    places, at = {}, 4096
    for region in call.regions:
        places[region.address] = at
        at += -(-len(region.before) // 4096) * 4096 + 4096
    places[-1] = at
    return places


def _argument(number: int, call: Call, places: dict[int, int]) -> str:
    if number in call.functions:
        return f"ptrtoint (ptr @apart_{number} to i64)"
    for region in call.regions:
        if region.address <= number <= region.address + len(region.before):
            offset = places[region.address] + number - region.address
            return f"add (i64 ptrtoint (ptr @arena to i64), i64 {offset})"
    return str(number)


def _parsed(code: str, wrapper: Callable[[str, list[str]], str], what: str) -> llvm.ModuleRef:
    """A function of Numba's with another one, which calls it; written from its name and the types of its arguments."""
    match = re.search(_DEFINITION, code, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{what} has no function that is understood")
    code = re.sub(r"^target (triple|datalayout).*$", "", code, flags=re.MULTILINE)
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    kinds = [part.split()[0] for part in match[2].split(",") if part.strip()]
    module = llvm.parse_assembly(code + wrapper(match[1], kinds))
    module.triple = "aarch64-unknown-linux-gnu"
    return module


def _module(call: Call, places: dict[int, int]) -> llvm.ModuleRef:
    """The kernel and a function that calls it with the recorded arguments."""

    def replay(name: str, kinds: list[str]) -> str:
        if len(kinds) != len(call.arguments):
            raise RuntimeError(f"{call.kernel} takes {len(kinds)} numbers; {len(call.arguments)} were recorded")
        arguments = [f"{kind} {_argument(number, call, places)}" for kind, number in zip(kinds, call.arguments)]
        declared = [f"declare i64 @apart_{number}(...)\n" for number in call.functions]
        return (
            f"\n@arena = external global i8\n{''.join(declared)}"
            "define void @replay() {\n  %none = alloca ptr\n  %error = alloca ptr\n"
            f"  %code = call i32 @{name}(ptr %none, ptr %error, {', '.join(arguments)})\n  ret void\n}}\n"
        )

    module = _parsed(call.code, replay, call.kernel)
    for address, code in call.functions.items():

        def apart(name: str, kinds: list[str], address: int = address) -> str:
            taken = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(kinds))
            return (
                f"\ndefine i64 @apart_{address}({taken}) {{\n  %result = alloca i64\n  %error = alloca ptr\n"
                f"  %code = call i32 @{name}(ptr %result, ptr %error, {taken})\n"
                "  %value = load i64, ptr %result\n  ret i64 %value\n}\n"
            )

        module.link_in(_parsed(code, apart, f"a function that {call.kernel} calls"))
    for function in module.functions:
        if not function.is_declaration and function.name != "replay":
            function.linkage = "internal"
    return module


def translate(call: Call, places: dict[int, int]) -> str:
    """Give the call as assembly."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu=CPU, opt=3, reloc="pic")
    module = _module(call, places)
    module.data_layout = str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module)


def operations(assembly: str) -> tuple[int, int]:
    """How many arithmetic instructions of floats or products are on vectors, and on single numbers."""
    found = Counter(vectors=len(_VECTOR.findall(assembly)), singles=len(_SCALAR.findall(assembly)))
    return found["vectors"], found["singles"]


def run(call: Call, folder: Path) -> tuple[str, float]:
    """Emulate a call.

    Returns:
        The assembly, and the largest difference from this machine's numbers, over the largest of them.
    """
    places = _places(call)
    assembly = translate(call, places)
    (folder / "kernel.s").write_text(assembly)
    (folder / "main.c").write_text(_MAIN.format(size=places[-1]))
    memory = bytearray(places[-1])
    for region in call.regions:
        at = places[region.address]
        memory[at : at + len(region.before)] = region.before
    (folder / "before").write_bytes(memory)
    program, names = folder / "program", [folder / "before", folder / "after"]
    subprocess.run(
        [COMPILER, "-O1", "-static", "-o", program, folder / "main.c", folder / "kernel.s", "-lm"], check=True
    )
    subprocess.run([EMULATOR, program, *names], check=True)
    memory = bytearray(names[1].read_bytes())
    worst = 0.0
    for region in call.regions:
        at = places[region.address]
        worst = max(worst, _difference(bytes(memory[at : at + len(region.after)]), region.after, region.dtype))
    return assembly, worst


def _difference(mine: bytes, right: bytes, dtype: torch.dtype) -> float:
    a, b = (torch.frombuffer(bytearray(part), dtype=dtype) for part in (mine, right))
    if not dtype.is_floating_point and not dtype.is_complex:
        return float((a != b).any())
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    different = torch.where(a.isfinite() | b.isfinite(), (a - b).abs(), 0.0)
    return float(different.max() / b.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-30))
