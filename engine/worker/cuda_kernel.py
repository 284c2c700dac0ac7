"""CUDA kernels whose compiled code is kept on disk, so that each is compiled once on a machine.

MLX 0.32.4 looks for a kernel's code in its folder, by the kernel's name and a hash of its source, and compiles what is
not there. It writes the code of its own kernels, but not of those of `mx.fast.cuda_kernel`: every start compiled them
again, and a batch of a size that was new stood still meanwhile. Here they are compiled before MLX looks for them, by
the same compiler with the same options. Where that fails MLX compiles them as before, and the log says why.
"""

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.user_cache import user_cache

log = logging.getLogger("orchard.engine")

_INCLUDES = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_TYPES = """
#pragma once
#include <cuda/std/cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define INFINITY __int_as_float(0x7f800000)
namespace mlx::core::cu {
template <typename T> struct Eight {
    T values[8];
    __device__ const T& operator[](int i) const { return values[i]; }
};
using Shape = Eight<int32_t>;
using Strides = Eight<int64_t>;
}
"""
_HEADERS = {
    b"mlx/backend/cuda/device/utils.cuh": _TYPES.encode(),
    b"cooperative_groups.h": b"namespace cooperative_groups {}",
}
"""What stands for the headers of _INCLUDES, all that our kernels need of them: a kernel is compiled in 0.2 s, not in
1.3."""
_NAMES = {
    mx.bool_: ("bool", "bool"),
    mx.int8: ("int8_t", "int8_t"),
    mx.int16: ("int16_t", "int16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.int64: ("int64_t", "int64_t"),
    mx.uint8: ("uint8_t", "uint8_t"),
    mx.uint16: ("uint16_t", "uint16_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.uint64: ("uint64_t", "uint64_t"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float32: ("float", "float"),
}
"""dtype -> its name in a kernel's source, and in a kernel's name."""
failures: list[str] = []
"""Why kernels of this process are not kept, each reason once."""
NAMESPACE = "mlx::core::cu::"
_SEED = 0xC70F6907
"""Of std::hash<std::string> in libstdc++."""

Template = Sequence[tuple[str, bool | int | mx.Dtype]]


class CudaKernel:
    """A kernel of `mx.fast.cuda_kernel`, compiled at most once on a machine.

    Args:
        name: As all further ones, of `mx.fast.cuda_kernel`.
    """

    def __init__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> None:
        self._name, self._input_names, self._output_names = name, input_names, output_names
        self._source, self._header = source, header
        self._launch: Any = mx.fast.cuda_kernel(
            name=name, input_names=input_names, output_names=output_names, source=source, header=header
        )
        self._kept: set[tuple[Any, ...]] = set()

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Launch the kernel, as `mx.fast.cuda_kernel` does."""
        are_scalars = [array.ndim == 0 for array in inputs]
        form = (*(value for _, value in template), *(array.dtype for array in inputs), *output_dtypes, *are_scalars)
        if form not in self._kept:
            self._kept.add(form)
            name = kernel_name(self._name, template)
            keep_compiled(name, self.whole_source(name, inputs, template, output_dtypes))
        return self._launch(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )

    def whole_source(
        self, name: str, inputs: Sequence[mx.array], template: Template, output_dtypes: Sequence[mx.Dtype]
    ) -> str:
        """Return the source that MLX compiles for such arrays, letter by letter: its hash is in the file's name."""
        parameters: list[str] = []
        for input_name, array in zip(self._input_names, inputs, strict=True):
            parameters.append(f"    const {_NAMES[array.dtype][0]}* {input_name}")
            for suffix, kind in (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")):
                if array.ndim > 0 and input_name + suffix in self._source:
                    parameters.append(f"    const __grid_constant__ {kind} {input_name}{suffix}")
        outputs = zip(self._output_names, output_dtypes, strict=True)
        parameters += [f"    {_NAMES[dtype][0]}* {output_name}" for output_name, dtype in outputs]
        constants = "".join(_constant(constant, value) for constant, value in template)
        begin = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        head = f"__global__ void {name}(\n" + ",\n".join(parameters) + ") {\n"
        body = constants + ("\n" if constants else "") + self._source
        return _INCLUDES + self._header + begin + head + body + "\n}\n\n} // namespace mlx::core::cu\n"


def _constant(name: str, value: bool | int | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_NAMES[value][0]};\n"
    kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
    return f"  constexpr {kind} {name} = {text};\n"


def kernel_name(name: str, template: Template) -> str:
    """Return the name that MLX gives to a kernel with these constants."""

    def suffix(value: bool | int | mx.Dtype) -> str:
        if isinstance(value, mx.Dtype):
            return _NAMES[value][1]
        return str(value)[0].lower() if isinstance(value, bool) else str(value)

    return "_".join([f"custom_kernel_{name}", *(suffix(value) for _, value in template)])


def keep_compiled(name: str, source: str) -> None:
    """Compile a kernel and write its code where MLX looks for it, unless it is there. Failures are logged.

    Args:
        name: As `kernel_name` says.
        source: As `CudaKernel.whole_source` says.
    """
    try:
        path = code_path(name, source)
        if path.exists():
            return
        write_code(path, name, *compiled(name, source))
    except Exception as error:  # MLX compiles it then
        _warn(f"{type(error).__name__}: {error}")


def write_code(path: Path, name: str, code: bytes, lowered: str) -> None:
    """Write a kernel's code, and beside it the name that it has there, as MLX reads them.

    Args:
        path: As `code_path` says.
        name: As `kernel_name` says.
        code: As `compiled` says.
        lowered: As `compiled` says.

    Raises:
        OSError: A file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{os.getpid()}.unfinished")
    names = f"{NAMESPACE}{name}\t{lowered}\n"
    try:
        for target, content in ((path.with_suffix(".txt"), names.encode()), (path, code)):  # MLX reads the code first
            unfinished.write_bytes(content)
            os.replace(unfinished, target)  # other engines may read or write them too
    finally:
        unfinished.unlink(missing_ok=True)


def _warn(reason: str) -> None:
    if reason not in failures:
        failures.append(reason)
        log.warning("a compiled CUDA kernel is not kept, each start compiles it again: %s", reason)


def keep_all() -> None:
    """Let MLX keep code in the user's cache, by version and device; its default is a folder that a restart empties.

    Call it before the first kernel. MLX_PTX_CACHE_DIR names another folder.
    """
    device = mx.device_info()
    major, minor = (device.get(f"compute_capability_{part}", 0) for part in ("major", "minor"))
    folder = user_cache() / "cuda-kernels" / f"mlx-{metadata.version('mlx')}-sm_{major}{minor}"
    if "MLX_PTX_CACHE_DIR" not in os.environ:
        os.environ["MLX_PTX_CACHE_DIR"] = str(folder)


def code_path(name: str, source: str) -> Path:
    """Return the file in which MLX looks for a kernel's code; names longer than 245 characters are split into folders.

    Raises:
        KeyError: `keep_all` was not called.
        OSError: The C++ library was not found.
    """
    folder = Path(os.environ["MLX_PTX_CACHE_DIR"])
    module = f"{name}_{std_hash(source.encode()):x}"
    while len(module) > 245:
        folder, module = folder / module[:245], module[245:]
    return folder / f"{module}.ptx"


def std_hash(data: bytes) -> int:
    """Return std::hash<std::string> of libstdc++, with which MLX is built.

    Raises:
        OSError: The library was not found.
    """
    hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    hash_bytes.restype, hash_bytes.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return hash_bytes(data, len(data), _SEED)


def compiled(name: str, source: str, library: str = "libnvrtc.so.13") -> tuple[bytes, str]:
    """Compile a kernel for the device by NVRTC, which MLX has loaded.

    Args:
        name: As `kernel_name` says.
        source: As `CudaKernel.whole_source` says.
        library: NVRTC's file.

    Returns:
        The device's code, and the name that the kernel has in it.

    Raises:
        OSError: NVRTC was not found.
        RuntimeError: It failed; with its log.
    """
    nvrtc = ctypes.CDLL(library)
    program, expression = ctypes.c_void_p(), (NAMESPACE + name).encode()
    strings = ctypes.c_char_p * len(_HEADERS)
    headers, names = strings(*_HEADERS.values()), strings(*_HEADERS)
    options = [option.encode() for option in _options()]

    def call(function: str, *arguments: Any) -> None:
        if status := getattr(nvrtc, function)(*arguments):
            raise RuntimeError(f"{function} of {library} failed with status {status}{_log(nvrtc, program)}")

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", len(_HEADERS), headers, names)
    try:
        call("nvrtcAddNameExpression", program, expression)
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        lowered, size = ctypes.c_char_p(), ctypes.c_size_t()
        call("nvrtcGetLoweredName", program, expression, ctypes.byref(lowered))
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, code)
        return code.raw, (lowered.value or b"").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    """Return what the compiler wrote, behind a colon."""
    size = ctypes.c_size_t()
    if not program or nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value < 2:
        return ""
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return f": {text.value.decode(errors='replace')[:2000]}"


@cache
def _options() -> Sequence[str]:
    """Return the options with which MLX calls NVRTC."""
    device: Mapping[str, Any] = mx.device_info()
    major, minor = int(device["compute_capability_major"]), int(device["compute_capability_minor"])
    spec = find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations
    bundled = Path(next(iter(spec.submodule_search_locations))) / "include"
    toolkit = bundled.parents[1] / "nvidia" / "cu13"
    if not toolkit.exists():
        toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    folders = (bundled, bundled / "cccl", toolkit / "include")
    return [
        "--device-as-default-execution-space",
        f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}",
        *(f"--include-path={folder}" for folder in folders),
    ]
