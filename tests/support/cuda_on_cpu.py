"""Runs the source of CUDA kernels on a CPU: compiled by g++; the lanes of a block take turns. For small shapes.

It knows what the kernels of few_rows_cuda, quantized_cuda and experts_cuda call (cuda_on_cpu.h), in bfloat16.
"""

import subprocess
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

TYPES = {mx.bfloat16: "bf16", mx.uint32: "uint32_t", mx.int32: "int32_t", mx.float32: "float", mx.bool_: "bool"}
NUMPY_TYPES: dict[mx.Dtype, type] = {
    mx.bfloat16: np.uint16,
    mx.uint32: np.uint32,
    mx.int32: np.int32,
    mx.float32: np.float32,
    mx.bool_: np.bool_,
}
"""dtype of an array -> dtype of the numbers in its file."""
HEADER = Path(__file__).with_suffix(".h")
PROGRAMS: dict[str, Path] = {}
"""Source of a kernel with the sizes of its arrays -> its program, for all tests of a process."""
COMPILER = ("g++", "-std=c++20", "-O1", "-w")


class Kernel:
    """Stands for a kernel of `mx.fast.cuda_kernel`, whose arguments it takes.

    Args:
        folder: For sources, programs and arrays.
        arguments: As `mx.fast.cuda_kernel` says.
    """

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self._folder = folder
        self._arguments = arguments

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        names, results = self._arguments["input_names"], self._arguments["output_names"]
        for name, array in zip(names, inputs, strict=True):
            bits = mx.contiguous(array).view(mx.uint16 if array.dtype == mx.bfloat16 else array.dtype)
            np.array(bits).tofile(self._folder / name)
        arrays = [
            f'auto {name}_all = read<{TYPES[array.dtype]}>("{name}", {array.size});'
            for name, array in zip(names, inputs, strict=True)
        ]
        sizes = [prod(shape) for shape in output_shapes]
        arrays += [
            f"auto {name}_all = ({TYPES[dtype]}*)calloc({size}, sizeof({TYPES[dtype]}));"
            for name, size, dtype in zip(results, sizes, output_dtypes, strict=True)
        ]
        body = [f"auto {name} = {name}_all;" for name in (*names, *results)]
        body += [
            f"const int {name}_shape[] = {{{', '.join(map(str, array.shape))}}};"
            for name, array in zip(names, inputs, strict=True)
        ]
        body += [
            f"const long {name}_strides[] = {{{', '.join(str(prod(x.shape[i + 1 :])) for i in range(x.ndim))}}};"
            for name, x in zip(names, inputs, strict=True)
        ]
        body += [
            f"using {name} = {TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {int(value)};"
            for name, value in template
        ]
        blocks = [whole // of_block for whole, of_block in zip(grid, threadgroup, strict=True)]
        written = [f'write("{name}", {name}_all, {size});' for name, size in zip(results, sizes, strict=True)]
        self._run(arrays, body, f"{blocks[0]}, {blocks[1]}, {threadgroup[0]}, {threadgroup[1]}", written)
        return [
            mx.array(np.fromfile(self._folder / name, NUMPY_TYPES[dtype])).view(dtype).reshape(shape)
            for name, shape, dtype in zip(results, output_shapes, output_dtypes, strict=True)
        ]

    def _run(self, arrays: Sequence[str], body: Sequence[str], launched: str, written: Sequence[str]) -> None:
        """Compile the kernel with its arrays and the first lines of its body, run it, and write its results."""
        # The header's own function for tensor cores is assembly; cuda_on_cpu.h has another one.
        header = self._arguments["header"].partition("// Multiply eight")[2]
        lines = [f'#include "{HEADER}"', "//" + header, *arrays, "void kernel() {", *body]
        # Memory whose size the source does not give.
        lines.insert(1, f"uint4 staged[{self._arguments['shared_memory'] // 16 + 1}];")
        code = self._arguments["source"].replace("extern __shared__ uint4 staged[];", "")
        lines += [code, "}", f"int main() {{ launch({launched});", *written, "}"]
        code = "\n".join(lines)
        if code not in PROGRAMS:
            source = self._folder / f"kernel{len(PROGRAMS)}.cpp"
            source.write_text(code)
            subprocess.run([*COMPILER, source, "-o", source.with_suffix("")], check=True, timeout=120)
            PROGRAMS[code] = source.with_suffix("")
        subprocess.run([PROGRAMS[code]], cwd=self._folder, check=True, timeout=120)
