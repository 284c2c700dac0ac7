"""CUDA kernels whose compiled code is cached on disk, so that a start finds what an earlier one has compiled.

MLX 0.32.4 looks for a kernel's code in a folder, by the kernel's name and a hash of its source, and compiles what is
not there. It writes the code of its own kernels (ml-explore/mlx#3587), but not of those of `mx.fast.cuda_kernel` (the
last argument of `get_jit_module` in mlx/backend/cuda/custom_kernel.cpp): every start compiled them again, and rows
waited for the kernels of a batch size that was new. Here a kernel is compiled before MLX looks for it, by the same
compiler with the same options. If that fails, MLX compiles it, and the log and `/v1/status` say why. The file can be
removed when MLX writes them itself.
"""

import ctypes
import logging
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.user_cache import user_cache

log = logging.getLogger("orchard.engine")

NAMESPACE = "mlx::core::cu::"
FOLDER = "MLX_PTX_CACHE_DIR"
"""The environment variable with the folder of compiled code, which MLX reads when it compiles the first kernel."""
_SEED = 0xC70F6907
"""The seed of std::hash<std::string> in libstdc++."""
_INCLUDES = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_TYPES = """
#pragma once
#include <cuda/std/cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define INFINITY __int_as_float(0x7f800000)
namespace mlx::core::cu {
template <typename T> struct Sizes {
    T values[10];
    __device__ const T& operator[](int i) const { return values[i]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
}
"""
_HEADERS = {
    b"mlx/backend/cuda/device/utils.cuh": _TYPES.encode(),
    b"cooperative_groups.h": b"namespace cooperative_groups {}",
}
"""Replacements of the headers in _INCLUDES: the parts that Orchard's kernels need. With them NVRTC 13.5 compiled a
kernel of few rows in 0.2 s, with CUDA's cooperative_groups.h in 1.2 to 1.7."""
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

_failures: list[str] = []

Template = Sequence[tuple[str, bool | int | mx.Dtype]]
"""A kernel's constants and types, in the order of their declaration."""


def failures() -> Sequence[str]:
    """Return why code of this process could not be cached, each reason once."""
    return tuple(_failures)


def short(source: str) -> str:
    """Return a kernel's source without comments and indentation: MLX hashes it at each launch."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


class CudaKernel:
    """A kernel of `mx.fast.cuda_kernel` whose compiled code is cached on disk.

    Args:
        name: Name of the kernel, without the constants.
        input_names: Names of the inputs in the source.
        output_names: Names of the outputs in the source.
        source: Body of the kernel.
        header: Source before the kernel.
        shared_memory: Bytes of a block's memory whose size the source does not give.
        are_contiguous: Whether inputs that are not contiguous are copied; the source reads strides otherwise.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        shared_memory: int = 0,
        are_contiguous: bool = True,
    ) -> None:
        self._name, self._input_names, self._output_names = name, input_names, output_names
        self._source, self._header = source, header
        self._launch: Any = mx.fast.cuda_kernel(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            header=header,
            ensure_row_contiguous=are_contiguous,
            shared_memory=shared_memory,
        )
        self._cached_forms: set[tuple[Any, ...]] = set()

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
        form = (*template, *[(array.dtype, array.ndim) for array in inputs], *output_dtypes)
        if form not in self._cached_forms:
            self._cached_forms.add(form)
            self._cache(inputs, template, output_dtypes)
        return self._launch(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )

    def _cache(self, inputs: Sequence[mx.array], template: Template, output_dtypes: Sequence[mx.Dtype]) -> None:
        """Compile the kernel for such arrays and cache its code, unless it is there, or there is no folder for it."""
        if FOLDER not in os.environ:
            return
        try:
            name = kernel_name(self._name, template)
            source = self.whole_source(name, inputs, template, output_dtypes)
            path = code_path(name, source)
            if not _is_whole(path):
                write_code(path, name, *compiled(name, source))
        except Exception as error:  # MLX compiles the kernel then
            reason = f"{type(error).__name__}: {error}"
            if reason not in _failures:
                _failures.append(reason)
                log.warning("a compiled CUDA kernel is not cached, each start compiles it again: %s", reason)

    def whole_source(
        self, name: str, inputs: Sequence[mx.array], template: Template, output_dtypes: Sequence[mx.Dtype]
    ) -> str:
        """Return exactly the source that MLX compiles for such arrays: the file's name contains its hash.

        Args:
            name: See `kernel_name`.
            inputs: Arrays with the dtypes and numbers of dimensions of the inputs.
            template: The kernel's constants and types.
            output_dtypes: The dtypes of the outputs.
        """
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


def use_cache_folder() -> None:
    """Let MLX cache code in the user's cache, by version and device; a restart may empty its default folder.

    Call it before the first kernel is compiled. Where the operator has named a folder (MLX_PTX_CACHE_DIR), it is used.
    Code that was not written to its end is deleted. If the folder cannot be used, MLX uses its default, and Orchard's
    kernels are not cached.
    """
    types = sha256(repr(_HEADERS).encode()).hexdigest()[:8]
    own = user_cache() / "cuda-kernels" / f"mlx-{metadata.version('mlx')}-{_architecture()}-{types}"
    folder = Path(os.environ.pop(FOLDER, own))
    try:
        folder.mkdir(parents=True, exist_ok=True)  # MLX caches nothing if another process makes it at the same time
        for path in folder.rglob("*.ptx"):
            if not _is_whole(path):
                path.unlink(missing_ok=True)
        os.environ[FOLDER] = str(folder)
    except OSError as error:
        _failures.append(str(error))
        log.warning("compiled CUDA kernels are not cached, each start compiles them again: %s", error)


def _is_whole(path: Path) -> bool:
    """Return whether a kernel's code and its names are there; both are written at the end."""
    return all(file.exists() and file.stat().st_size > 0 for file in (path, path.with_suffix(".txt")))


def write_code(path: Path, name: str, code: bytes, lowered: str) -> None:
    """Write a kernel's code, and beside it the name of the kernel in the code, as MLX reads them.

    Args:
        path: See `code_path`.
        name: See `kernel_name`.
        code: The device's code.
        lowered: The name of the kernel in the code.

    Raises:
        OSError: A file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = f"{NAMESPACE}{name}\t{lowered}\n".encode()
    for target, content in ((path.with_suffix(".txt"), names), (path, code)):  # MLX looks for the code first
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)  # other engines may read or write it at the same time
        finally:
            Path(unfinished).unlink(missing_ok=True)


def code_path(name: str, source: str) -> Path:
    """Return the file in which MLX looks for a kernel's code; names longer than 245 characters are split into folders.

    Args:
        name: See `kernel_name`.
        source: See `CudaKernel.whole_source`.

    Raises:
        KeyError: `use_cache_folder` was not called.
        OSError: The C++ library was not found.
    """
    folder, module = Path(os.environ[FOLDER]), f"{name}_{std_hash(source.encode()):x}"
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
        name: See `kernel_name`.
        source: See `CudaKernel.whole_source`.
        library: The file of NVRTC.

    Returns:
        The device's code, and the name of the kernel in it.

    Raises:
        OSError: NVRTC was not found.
        RuntimeError: The compiler failed; with its log.
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
    """Return the compiler's messages, behind a colon."""
    size = ctypes.c_size_t()
    if not program or nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value < 2:
        return ""
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return f": {text.value.decode(errors='replace')[:2000]}"


def _architecture() -> str:
    """Return the device's architecture as NVRTC names it."""
    device = mx.device_info()
    major, minor = int(device["compute_capability_major"]), int(device["compute_capability_minor"])
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@cache
def _options() -> Sequence[str]:
    """Return the options with which MLX calls NVRTC."""
    spec = find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations
    bundled = Path(next(iter(spec.submodule_search_locations))) / "include"
    toolkit = bundled.parents[1] / "nvidia" / "cu13" / "include"
    if not toolkit.exists():
        toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "include"
    return [
        "--device-as-default-execution-space",
        f"--gpu-architecture={_architecture()}",
        *(f"--include-path={folder}" for folder in (bundled, bundled / "cccl", toolkit)),
    ]
