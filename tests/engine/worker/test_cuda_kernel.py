"""CUDA kernels are cached where MLX looks for them. NVRTC and a device are not here: that MLX finds them is a check of
`orchard self-test` ("cache of CUDA kernels").
"""

import os
import shutil
import subprocess
import sys
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest

from engine.worker import cuda_kernel
from engine.worker.cuda_kernel import CudaKernel, code_path, kernel_name, short, std_hash, use_cache_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is supported on Linux alone")

SOURCE = "y[0] = x_shape[0] + scale[0];"
TEMPLATE = [("T", mx.bfloat16), ("Rows", 16), ("Whole", True), ("Record", False)]
INPUTS = [mx.zeros((2, 3), mx.float16), mx.array(1.0)]
WHOLE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

constexpr int EXTRA = 1;
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_example_bfloat16_t_16_t_f(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const float* scale,
    __nv_bfloat16* y,
    uint32_t* counts) {
  using T = __nv_bfloat16;
  constexpr int Rows = 16;
  constexpr bool Whole = true;
  constexpr bool Record = false;

y[0] = x_shape[0] + scale[0];
}

} // namespace mlx::core::cu
"""
"""Written after `build_kernel` in MLX's custom_kernel.cpp."""


class Launched:
    """Stands for a kernel of `mx.fast.cuda_kernel`, which needs a device."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.launches: list[dict[str, Any]] = []

    def __call__(self, **launch: Any) -> list[mx.array]:
        self.launches.append(launch)
        return [mx.zeros(shape) for shape in launch["output_shapes"]]


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> CudaKernel:
    monkeypatch.setattr(mx.fast, "cuda_kernel", Launched)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "cached"))
    monkeypatch.setattr(cuda_kernel, "_failures", [])
    return CudaKernel("example", ["x", "scale"], ["y", "counts"], SOURCE, "constexpr int EXTRA = 1;\n")


def launch(kernel: CudaKernel, rows: int = 16, dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    template = [("T", dtype), ("Rows", rows), ("Whole", True), ("Record", False)]
    return kernel(INPUTS, template, (1, 1, 1), (1, 1, 1), [(1,), (1,)], [dtype, mx.uint32])


def test_the_source_is_the_one_that_mlx_compiles(kernel):
    name = kernel_name("example", TEMPLATE)
    assert name == "custom_kernel_example_bfloat16_t_16_t_f"
    assert kernel.whole_source(name, INPUTS, TEMPLATE, [mx.bfloat16, mx.uint32]) == WHOLE
    assert kernel_name("plain", ()) == "custom_kernel_plain"
    plain = CudaKernel("plain", [], ["y"], "y[0] = 1;").whole_source("custom_kernel_plain", [], (), [mx.float32])
    assert plain.endswith("void custom_kernel_plain(\n    float* y) {\ny[0] = 1;\n}\n\n} // namespace mlx::core::cu\n")


def test_the_hash_of_a_source_is_that_of_the_c_library(tmp_path):
    if shutil.which("g++") is None:
        assert not os.environ.get("CI"), "the hash is compared by g++, which is not here"
        pytest.skip("the hash is compared by g++, which is not here")
    texts = [("ab\xe4c" * 20)[:length].encode() for length in range(18)] + [WHOLE.encode()]
    program = tmp_path / "hash.cpp"
    program.write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\n"
        "int main(int n, char** texts) { for (int i = 1; i < n; ++i)"
        ' std::printf("%zx\\n", std::hash<std::string>{}(texts[i])); }'
    )
    subprocess.run(["g++", "-O1", program, "-o", tmp_path / "hash"], check=True, timeout=120)
    done = subprocess.run([tmp_path / "hash", *texts], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split() == [f"{std_hash(text):x}" for text in texts]


def test_each_form_is_compiled_once_and_cached_with_its_name(kernel, monkeypatch, tmp_path):
    asked: list[str] = []
    monkeypatch.setattr(cuda_kernel, "compiled", lambda name, source: asked.append(name) or (b"code", f"_Z{name}"))
    for _ in range(2):
        assert [y.shape for y in launch(kernel)] == [(1,), (1,)]
    assert asked == ["custom_kernel_example_bfloat16_t_16_t_f"]
    path = code_path(asked[0], WHOLE)
    assert path.parent == tmp_path / "cached" and path.read_bytes() == b"code"
    assert path.with_suffix(".txt").read_text() == f"mlx::core::cu::{asked[0]}\t_Z{asked[0]}\n"
    assert len(list(path.parent.iterdir())) == 2, "nothing unfinished is left"

    launch(CudaKernel("example", ["x", "scale"], ["y", "counts"], SOURCE, "constexpr int EXTRA = 1;\n"))
    assert len(asked) == 1, "another start finds it"
    launch(kernel, rows=32)
    launch(kernel, dtype=mx.float32)
    assert asked[1:] == ["custom_kernel_example_bfloat16_t_32_t_f", "custom_kernel_example_float_16_t_f"]
    assert len(kernel._launch.launches) == 4


def test_a_kernel_that_cannot_be_cached_is_launched_and_the_log_says_why_once(kernel, monkeypatch, caplog, tmp_path):
    def failing(name: str, source: str) -> tuple[bytes, str]:
        raise RuntimeError("nvrtcCompileProgram of libnvrtc.so.13 failed with status 6: INFINITY is undefined")

    monkeypatch.setattr(cuda_kernel, "compiled", failing)
    launch(kernel)
    launch(kernel, rows=32)
    assert len(kernel._launch.launches) == 2
    [record] = caplog.records
    assert "a compiled CUDA kernel is not cached" in record.message and "INFINITY is undefined" in record.message

    (tmp_path / "cached").write_text("a file in the place of the folder")
    monkeypatch.setattr(cuda_kernel, "compiled", lambda name, source: (b"code", "_Z"))
    launch(kernel, rows=64)
    assert len(kernel._launch.launches) == 3 and str(tmp_path / "cached") in caplog.records[-1].message


def test_without_the_compiler_or_with_an_unknown_dtype_the_log_says_so_and_the_kernel_is_launched(kernel, caplog):
    with pytest.raises(OSError, match="no-such-library"):
        cuda_kernel.compiled("custom_kernel_example", WHOLE, "no-such-library.so")
    kernel([mx.zeros(1, mx.complex64)], [], (1, 1, 1), (1, 1, 1), [(1,)], [mx.float32])
    assert len(kernel._launch.launches) == 1 and "complex64" in caplog.text
    assert len(cuda_kernel.failures()) == 1


def test_code_that_was_not_written_to_its_end_is_compiled_again(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_kernel, "compiled", lambda name, source: (b"code", "_Z"))
    launch(kernel)
    path = code_path(kernel_name("example", TEMPLATE), WHOLE)
    path.write_bytes(b"")
    foreign = tmp_path / "cached" / "unary_op.ptx"
    foreign.write_bytes(b"half")
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9, "compute_capability_minor": 0})
    use_cache_folder()
    assert not path.exists() and not foreign.exists()
    launch(CudaKernel("example", ["x", "scale"], ["y", "counts"], SOURCE, "constexpr int EXTRA = 1;\n"))
    assert path.read_bytes() == b"code"
    use_cache_folder()
    assert path.exists()


def test_long_names_are_split_into_folders_as_mlx_does(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    name = "custom_kernel_" + "x" * 300
    module = f"{name}_{std_hash(b'source'):x}"
    assert code_path(name, "source") == tmp_path / module[:245] / f"{module[245:]}.ptx"


def test_code_is_cached_by_version_and_device_for_the_user_or_where_the_operator_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9, "compute_capability_minor": 0})
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "elsewhere"))
    use_cache_folder()
    assert code_path("short", "source").parent == tmp_path / "elsewhere"
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    use_cache_folder()
    folder = code_path("short", "source").parent
    assert folder.parent == tmp_path / "orchard" / "cuda-kernels" and folder.name.startswith("mlx-0.32.4-sm_90a-")
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_reported_and_costs_no_start(kernel, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9, "compute_capability_minor": 0})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    use_cache_folder()
    assert str(tmp_path / "file") in caplog.text and len(cuda_kernel.failures()) == 1
    assert "MLX_PTX_CACHE_DIR" not in os.environ, "MLX uses its default"
    launch(kernel)
    assert len(kernel._launch.launches) == 1 and len(cuda_kernel.failures()) == 1


def test_a_kernel_s_source_is_given_without_comments_and_indentation():
    assert short("\n  // why\n    a = b;  // and how\n\n    c();\n") == "a = b;\nc();"
