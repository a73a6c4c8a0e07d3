"""Registers and spills of the Hopper kernels' four builds, as their compiler counts them.

    pip install nvidia-cuda-nvrtc    # where PyTorch has not brought it
    python benchmarks/registers.py

It needs no GPU and takes a minute. Kernels that give registers from one warpgroup to another are counted by what each
thread begins with; what is spilled is counted by what it has then.
"""

import re
from dataclasses import dataclass
from itertools import product

import torch

from merope.attention.kernels.hopper_module import compiled_with_log, kernel_source

NUMBERS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


@dataclass(frozen=True)
class Kernel:
    """What the compiler says of one."""

    name: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread, in local memory
    stored_bytes: int  # by spills
    loaded_bytes: int


def main() -> None:
    """Compile every build and print a table."""
    print(f"NVRTC for PyTorch {torch.__version__}")
    print("| phases | some keys seen | kernel | registers | stack, bytes | spilled | loaded again |")
    print("|---|---|---|---|---|---|---|")
    for phases, visible in product((False, True), repeat=2):
        _, log = compiled_with_log(kernel_source(phases, visible).encode(), b"--ptxas-options=-v")
        for k in kernels(log):
            said = (k.name, k.registers, k.stack_bytes, k.stored_bytes, k.loaded_bytes)
            print("| " + " | ".join(map(str, (phases, visible, *said))) + " |")


def kernels(log: str) -> list[Kernel]:
    """Those of a log of ptxas -v, by name."""
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        numbers = NUMBERS.search(part)
        assert numbers is not None, f"no registers are named in: {part}"
        stack, stored, loaded, registers = map(int, numbers.groups())
        found.append(Kernel(part.split("'")[0], registers, stack, stored, loaded))
    return sorted(found, key=lambda kernel: kernel.name)


if __name__ == "__main__":
    main()
