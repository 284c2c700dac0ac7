"""Loads a fast BLAS for MLX's CPU backend on Linux, before MLX is imported.

The mlx-cpu wheel contains netlib's reference BLAS and LAPACK, 20 to 40 times slower than OpenBLAS in float32. A library
loaded with RTLD_GLOBAL before libmlx takes precedence. The scipy-openblas32 wheel is OpenBLAS with all symbols prefixed
by `scipy_`; patchelf creates, once per user, a copy in which the routines that MLX calls have their standard names.

Threads: OPENBLAS_NUM_THREADS, otherwise half of the cores for decode steps, and all of them for prompts and images
(`all_cores`). OMP_NUM_THREADS is ignored, because Ray sets it to a replica's num_cpus. Small products on all cores are
faster only on an idle machine. One thread against two on two cores: 32x256x256 54/33 us, 32x256x8192 2.3/1.2 ms; with
another busy process 0.3/8 ms for 4x256x4096, as each product waits for a time slice. Prompts of 480, 1200 and 3500
tokens of the demo model: 262/240, 690/605 and 2270/1990 ms.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from engine.gpus import has_cuda_backend
from engine.user_cache import user_cache

logger = logging.getLogger("orchard.engine")

SYMBOLS = (
    *("cblas_sgemm", "cblas_dgemm", "cblas_cgemm"),
    *("sgetrf_", "dgetrf_", "sgetri_", "dgetri_", "strtri_", "dtrtri_", "spotrf_", "dpotrf_"),
    *("sgeqrf_", "dgeqrf_", "sorgqr_", "dorgqr_", "sgesdd_", "dgesdd_", "cgesdd_"),
    *("sgeev_", "dgeev_", "cgeev_", "ssyevd_", "dsyevd_", "cheevd_"),
)
"""The symbols that libmlx imports from BLAS and LAPACK. Others keep their prefix, so that no other library binds to the
copy."""


@dataclass(frozen=True)
class BlasInfo:
    """The library that computes MLX's float32 products on the CPU. `path` and `core` are '' if none was loaded here."""

    source: Literal["system", "openblas wheel", "mlx bundled", "accelerate"]
    path: str
    reason: str
    core: str = ""
    """The CPU that OpenBLAS has chosen its kernels for."""


SetNumThreads = Callable[[int], None]


def preload() -> BlasInfo:
    """Load OpenBLAS once; later calls return the same result. Never raises: `reason` says why it was not loaded."""
    return _preload()[0]


@cache
def _preload() -> tuple[BlasInfo, SetNumThreads | None]:
    """Load OpenBLAS. The function is None if the number of threads is not set here."""
    if sys.platform == "darwin":
        return BlasInfo("accelerate", "", "MLX uses Accelerate on macOS"), None
    if has_cuda_backend():
        return BlasInfo("mlx bundled", "", "MLX's CUDA backend is installed"), None
    if "mlx.core" in sys.modules:
        logger.warning("MLX was imported before engine.worker: its float32 products on the CPU remain slow")
        return BlasInfo("mlx bundled", "", "MLX was imported before engine.worker"), None
    try:
        return _load_wheel()
    except (OSError, LookupError, subprocess.SubprocessError, PackageNotFoundError) as error:
        return _load_system(f"{type(error).__name__}: {error}")


def has_small_kernels() -> bool:
    """Return whether OpenBLAS multiplies small matrices without copying them first."""
    return preload().core in ("SkylakeX", "Cooperlake", "SapphireRapids")


def has_idle_core() -> bool:
    """Return whether a step's products have one BLAS thread on several cores, and the user has not set it."""
    return _preload()[1] is not None and _num_cores() > _half_the_cores() == 1


@contextmanager
def all_cores() -> Iterator[None]:
    """Let products of the whole process use all cores within the context. Must not be nested."""
    set_num_threads = _preload()[1]
    if set_num_threads is None:
        yield
        return
    set_num_threads(_num_cores())
    try:
        yield
    finally:
        set_num_threads(_half_the_cores())


def _num_cores() -> int:
    return os.cpu_count() or 1


def _half_the_cores() -> int:
    return max(1, _num_cores() // 2)


def _load_wheel() -> tuple[BlasInfo, SetNumThreads | None]:
    wheel = distribution("scipy-openblas32")
    original = _file_of(wheel, "libscipy_openblas.so")
    reason = f"scipy-openblas32 {wheel.version}"
    try:
        cached = _cache_dir(wheel.version) / "libopenblas.so"
        if not cached.exists():
            _make_copy(original, cached)
        core, set_num_threads = _load(cached)
        return BlasInfo("openblas wheel", str(cached), reason, core), set_num_threads
    except (OSError, RuntimeError) as error:  # no home directory, or an unusable cache
        with tempfile.TemporaryDirectory(prefix="orchard-blas-") as private:
            copy = Path(private) / "libopenblas.so"
            _make_copy(original, copy)
            core, set_num_threads = _load(copy)  # stays mapped after the file is removed
        logger.warning("Each process makes its own copy of OpenBLAS because the user's cache cannot be used: %s", error)
        return BlasInfo("openblas wheel", str(copy), f"{reason}, not cached: {error}", core), set_num_threads


def _load_system(why_not_wheel: str) -> tuple[BlasInfo, SetNumThreads | None]:
    try:
        core, set_num_threads = _load(Path("libopenblas.so.0"))
    except OSError:
        logger.warning(
            "MLX's float32 products on the CPU are 20 to 40 times slower, as OpenBLAS cannot be loaded: %s",
            why_not_wheel,
        )
        return BlasInfo("mlx bundled", "", why_not_wheel), None
    return BlasInfo("system", "libopenblas.so.0", why_not_wheel, core), set_num_threads


def _load(library: Path) -> tuple[str, SetNumThreads | None]:
    """Load a library; return its core, and the function that sets its threads, None if the user's environment does."""
    loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    for symbol in SYMBOLS:
        if not hasattr(loaded, symbol):
            raise OSError(f"{library} lacks {symbol}")
    prefix = "scipy_" if hasattr(loaded, "scipy_openblas_set_num_threads") else ""
    core_name = getattr(loaded, f"{prefix}openblas_get_corename")
    core_name.restype = ctypes.c_char_p
    core = core_name().decode()
    if os.environ.get("OPENBLAS_NUM_THREADS"):
        return core, None
    set_num_threads = getattr(loaded, f"{prefix}openblas_set_num_threads")
    set_num_threads(_num_cores())  # creates all threads once
    set_num_threads(_half_the_cores())
    return core, set_num_threads


def _file_of(package: Distribution, name: str) -> Path:
    for file in package.files or ():
        if file.name == name:
            return Path(str(package.locate_file(file))).resolve()
    raise LookupError(f"{package.name} {package.version} has no file {name}")


def _cache_dir(version: str) -> Path:
    symbols = hashlib.sha256(" ".join(SYMBOLS).encode()).hexdigest()[:8]
    return user_cache() / f"openblas-{version}-{platform.machine()}-{symbols}"


def _make_copy(original: Path, copy: Path) -> None:
    """Create the copy atomically, also with several processes at once.

    It is written to a temporary file and renamed.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent) as private:
        names, patched = Path(private) / "names", Path(private) / copy.name
        names.write_text("".join(f"scipy_{symbol} {symbol}\n" for symbol in SYMBOLS))
        shutil.copyfile(original, patched)
        patchelf = str(_file_of(distribution("patchelf"), "patchelf"))
        for change in (["--rename-dynamic-symbols", str(names)], ["--set-soname", "liborchard_openblas.so"]):
            subprocess.run([patchelf, *change, str(patched)], check=True, capture_output=True, timeout=60)
        patched.replace(copy)
