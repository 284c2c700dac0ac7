"""Makes MLX's CPU build look like Metal to Python code, and runs the kernels of `mx.fast.metal_kernel` as C++.

A kernel's source is compiled by g++ together with metal.h, which runs the threads of a threadgroup as fibers. This
shows wrong shapes, dtypes and arithmetic of kernels, and operations that Metal lacks; it does not show bandwidth, the
GPU's watchdog, fast-math, or MLX's own compiled kernels. It changes MLX for the whole process, so that only programs
of their own call `install`.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

HEADER = Path(__file__).parent / "metal.h"

TYPES = {
    mx.float32: ("float", np.float32),
    mx.bfloat16: ("bfloat16_t", np.uint16),
    mx.float16: ("half", np.float16),
    mx.int8: ("int8_t", np.int8),
    mx.int16: ("int16_t", np.int16),
    mx.int32: ("int", np.int32),
    mx.int64: ("int64_t", np.int64),
    mx.uint8: ("uint8_t", np.uint8),
    mx.uint16: ("uint16_t", np.uint16),
    mx.uint32: ("uint32_t", np.uint32),
    mx.uint64: ("uint64_t", np.uint64),
    mx.bool_: ("bool", np.bool_),
}
"""C++ and NumPy types of MLX's; NumPy has no bfloat16, whose bits it sees as uint16."""

DEVICE_INFO = {
    "device_name": "Apple M2 Max",
    "architecture": "applegpu_g14s",
    "max_buffer_length": 38 * 2**30,
    "max_recommended_working_set_size": 48 * 2**30,
    "memory_size": 64 * 2**30,
    "resource_limit": 499000,
}

MAX_THREADS = 1024
"""Threads of a threadgroup."""

UNWRITTEN = 0xCD
"""Byte that fills outputs before a kernel runs."""

num_calls: dict[str, int] = {}
"""Calls of each kernel so far."""


def why_it_cannot_run() -> str | None:
    """Return why this machine cannot run kernels; None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the emulator switches fibers with instructions of x86-64, by the rules of Linux"
    return None if shutil.which("g++") else "the emulator needs g++"


def install(cache: Path, on_gpu: bool) -> None:
    """Make MLX look like Metal.

    Args:
        cache: Directory for compiled kernels.
        on_gpu: Whether the default device is the GPU; else it is a Mac's CPU, where kernels are refused.
    """
    anything: Any = mx
    anything.metal.is_available = lambda: True
    anything.fast.metal_kernel = lambda **of: Kernel(cache, on_gpu, **of)
    anything.compile = lambda fun=None, **options: (lambda f: f) if fun is None else fun  # kernels run eagerly
    anything.custom_function = WithoutGradients
    if on_gpu:
        new_stream = mx.new_thread_local_stream
        anything.default_device = GPU
        anything.device_info = lambda *device: dict(DEVICE_INFO)
        anything.new_thread_local_stream = lambda device: new_stream(mx.cpu)


class GPU:
    """A stand-in for MLX's default device."""

    type = mx.DeviceType.gpu

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GPU) or other == mx.gpu

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Device(gpu, 0)"


class WithoutGradients:
    """Takes the place of `mx.custom_function`: calls the function."""

    def __init__(self, function: Any):
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    def vjp(self, function: Any) -> Any:
        return function

    jvp = vmap = vjp


class Kernel:
    """A kernel as `mx.fast.metal_kernel` returns it."""

    def __init__(
        self,
        cache: Path,
        on_gpu: bool,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        **options: Any,
    ):
        self._cache, self._on_gpu, self._name = cache, on_gpu, name
        self._source, self._header = source, header
        self._input_names, self._output_names = input_names, output_names
        self._libraries: dict[str, ctypes.CDLL] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        **options: Any,
    ) -> list[mx.array]:
        """Run the kernel; see MLX's documentation."""
        if not self._on_gpu:
            raise ValueError("[metal_kernel] Only supports the GPU.")
        arrays = [mx.contiguous(given if isinstance(given, mx.array) else mx.array(given)) for given in inputs]
        assert len(arrays) == len(self._input_names), self._name
        assert np.prod(threadgroup) <= MAX_THREADS, f"{self._name}: {threadgroup} are more than {MAX_THREADS} threads"
        num_calls[self._name] = num_calls.get(self._name, 0) + 1
        library = self._library(arrays, output_dtypes, template or [])
        read = [as_numpy(array) for array in arrays]
        written = [np.empty(max(int(np.prod(shape)), 1), TYPES[dtype][1]) for shape, dtype in zip(
            output_shapes, output_dtypes, strict=True
        )]  # fmt: skip
        for out in written:
            if init_value is None:
                out.view(np.uint8).fill(UNWRITTEN)
            else:
                out.fill(init_value)
        library.run(
            _pointers([array.ctypes.data for array in (*read, *written)]),
            *_layouts(arrays),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*threadgroup),
        )
        return [
            as_mlx(out[: int(np.prod(shape))], dtype).reshape(shape)
            for out, shape, dtype in zip(written, output_shapes, output_dtypes, strict=True)
        ]

    def _library(
        self, arrays: list[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> ctypes.CDLL:
        code = self._program(arrays, output_dtypes, template)
        key = hashlib.sha256((code + HEADER.read_text()).encode()).hexdigest()[:24]
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(self._compiled(code, key)))
        return self._libraries[key]

    def _compiled(self, code: str, key: str) -> Path:
        library = self._cache / f"{self._name[:60]}-{key}.so"
        if library.exists():
            return library
        self._cache.mkdir(parents=True, exist_ok=True)
        source, unfinished = library.with_suffix(".cpp"), library.with_suffix(f".{os.getpid()}")
        source.write_text(code)
        options = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        done = subprocess.run(["g++", *options, str(source), "-o", str(unfinished)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"[metal::Device] Unable to build metal library from source {self._name}\n{done.stderr}")
        return unfinished.replace(library)

    def _program(
        self, arrays: list[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> str:
        """Return the kernel as C++: its arguments are globals, which `run` sets."""
        lines = [f'#include "{HEADER}"']
        if "using namespace metal" in self._header:
            lines.append("using namespace metal;")
        lines += [_constant(name, value) for name, value in template]
        lines.append(re.sub(r"#include <metal_\w+>|using namespace metal;", "", self._header))
        names, body, run = [], [], []
        for i, (name, array) in enumerate(zip(self._input_names, arrays, strict=True)):
            kind = TYPES[array.dtype][0]
            names += [f"static const {kind}* in{i}_; static const int* shape{i}_;"]
            names += [f"static const int64_t* strides{i}_; static int ndim{i}_;"]
            declared, value = ("&", f"*in{i}_") if array.ndim == 0 else ("*", f"in{i}_")
            body.append(f"const {kind}{declared} {name} = {value};")
            body += [
                f"const auto {name}_{fact} = {fact}{i}_;"
                for fact in ("shape", "strides", "ndim")
                if f"{name}_{fact}" in self._source
            ]
            run.append(f"in{i}_ = (const {kind}*)data[{i}]; shape{i}_ = (const int*)shapes[{i}];")
            run.append(f"strides{i}_ = (const int64_t*)strides[{i}]; ndim{i}_ = ndims[{i}];")
        for i, (name, dtype) in enumerate(zip(self._output_names, output_dtypes, strict=True)):
            kind = TYPES[dtype][0]
            names.append(f"static {kind}* out{i}_;")
            body.append(f"{kind}* {name} = out{i}_;")
            run.append(f"out{i}_ = ({kind}*)data[{len(arrays) + i}];")
        return "\n".join(
            [
                *lines,
                *names,
                "static void kernel_() {",
                *body,
                self._source,
                "}",
                'extern "C" void run(void** data, void** shapes, void** strides, const int* ndims, '
                "const uint* grid, const uint* group) {",
                *run,
                "dispatch_(kernel_, uint3{grid[0], grid[1], grid[2]}, uint3{group[0], group[1], group[2]}); }",
            ]
        )


def _constant(name: str, value: Any) -> str:
    """Return the C++ definition of a template argument."""
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value][0]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


def _layouts(arrays: list[mx.array]) -> tuple[Any, Any, Any]:
    """Return shapes, strides and numbers of dimensions of contiguous arrays."""
    shapes = [(ctypes.c_int * max(array.ndim, 1))(*array.shape) for array in arrays]
    strides = []
    for array in arrays:
        steps = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
        strides.append((ctypes.c_int64 * max(array.ndim, 1))(*steps))
    ndims = (ctypes.c_int * max(len(arrays), 1))(*(array.ndim for array in arrays))
    return _pointers_to(shapes), _pointers_to(strides), ndims


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _pointers_to(numbers: list[Any]) -> Any:
    pointers = _pointers([ctypes.addressof(one) for one in numbers])
    pointers.kept = numbers  # as long as the pointers
    return pointers


def as_numpy(array: mx.array) -> np.ndarray:
    """Return an array's values, the bits of bfloat16 as uint16."""
    return np.ascontiguousarray(np.array(mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array))


def as_mlx(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Return the array of `as_numpy`'s values."""
    return mx.view(mx.array(values), mx.bfloat16) if dtype == mx.bfloat16 else mx.array(values)
