import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from engine.worker import blas

pytestmark = pytest.mark.skipif(
    blas.preload().source == "accelerate" or "CUDA" in blas.preload().reason, reason="MLX does not use its own BLAS"
)

ROOT = Path(__file__).parents[3]

PRODUCT = """
import time
import mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)
a, b = random.standard_normal((512, 1024), np.float32), random.standard_normal((1024, 1024), np.float32)
x, y = mx.array(a), mx.array(b)
seconds = []
for _ in range(4):
    begin = time.perf_counter()
    product = x @ y
    mx.eval(product)
    seconds.append(time.perf_counter() - begin)
error = float(np.abs(np.array(product) - a @ b).max() / np.abs(a @ b).max())
print(json.dumps([min(seconds), error]))
"""

LINEAR_ALGEBRA = """
import numpy as np
a = np.random.default_rng(0).standard_normal((200, 200))
def everyone():
    results = [a @ a, *np.linalg.svd(a), np.linalg.inv(a), (a.astype(np.float32) @ a.astype(np.float32))]
    try:
        import scipy.linalg
    except ImportError:
        return results
    return [*results, *scipy.linalg.svd(a), *scipy.linalg.lu(a)]
before = everyone()
from engine.worker import blas
info = blas.preload()
import mlx.core as mx
u, s, vt = mx.linalg.svd(mx.array(a.astype(np.float32)), stream=mx.cpu)
mx_error = float(np.abs(np.array(u) * np.array(s) @ np.array(vt) - a).max())
same = all(np.array_equal(x, y) for x, y in zip(before, everyone(), strict=True))
print(json.dumps([info.source, mx_error, same]))
"""

PRELOAD = """
import logging, sys
logging.basicConfig(stream=sys.stdout)
from engine.worker import blas
info = blas.preload()
print(json.dumps([info.source, info.path, info.reason]))
"""


def start(script: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import json" + script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}, cwd=ROOT)


def finish(process: subprocess.Popen[str]) -> tuple[list, str]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1]), output


def run(script: str, **env: str) -> tuple[list, str]:
    return finish(start(script, **env))


@pytest.mark.night("it measures speed, which does not depend on Orchard's code")
def test_float32_products_are_ten_times_faster_than_with_the_blas_that_mlx_brings():
    stock, ours = [], []
    for _ in range(2):
        stock.append(run(PRODUCT)[0])
        ours.append(run("\nfrom engine.worker import blas\nblas.preload()" + PRODUCT)[0])
    assert max(error for _, error in stock + ours) <= 1e-4
    assert min(stock)[0] / min(ours)[0] >= 10


def test_numpy_and_scipy_compute_the_same_bits_before_and_after_and_mlx_decomposes():
    (source, mx_error, same), _ = run(LINEAR_ALGEBRA)
    assert source == "openblas wheel"
    assert mx_error <= 1e-4
    assert same


def test_every_routine_that_mlx_calls_is_renamed():
    [libmlx] = [Path(str(file.locate())) for file in distribution("mlx-cpu").files or () if file.name == "libmlx.so"]
    called = set(re.findall(rb"\0(cblas_[a-z]+|[sdcz][a-z0-9]{4,6}_)(?=\0)", libmlx.read_bytes()))
    assert {name.decode() for name in called} == set(blas.SYMBOLS)


def test_processes_that_start_together_share_one_copy(tmp_path: Path):
    processes = [start(PRELOAD, XDG_CACHE_HOME=str(tmp_path)) for _ in range(3)]
    results = [finish(process)[0] for process in processes]
    assert {source for source, _, _ in results} == {"openblas wheel"}
    assert {Path(path) for _, path, _ in results} == {file for file in tmp_path.rglob("*") if file.is_file()}


def test_a_cache_that_cannot_be_written_means_a_private_copy_and_a_warning(tmp_path: Path):
    (tmp_path / "file").touch()
    (source, path, reason), output = run(PRELOAD, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert source == "openblas wheel"
    assert "not cached" in reason and "WARNING" in output
    assert not Path(path).parent.exists()


def test_a_broken_file_in_the_cache_means_a_private_copy_and_a_warning(tmp_path: Path):
    (_, cached, _), _ = run(PRELOAD, XDG_CACHE_HOME=str(tmp_path))
    Path(cached).write_bytes(b"broken")
    (source, _, reason), output = run(PRELOAD, XDG_CACHE_HOME=str(tmp_path))
    assert source == "openblas wheel"
    assert "not cached" in reason and "WARNING" in output


def test_preloading_after_mlx_has_no_effect_and_warns():
    (source, _, reason), output = run("\nimport mlx.core" + PRELOAD)
    assert source == "mlx bundled"
    assert "imported before" in reason and "WARNING" in output


def test_another_blas_is_used_without_the_wheel_and_the_reason_is_recorded():
    without = "\nimport importlib.metadata as m\nreal = m.distribution\nm.distribution = lambda name: real('not-here')"
    (source, _, reason), output = run(without + PRELOAD)
    assert source in ("system", "mlx bundled")
    assert "not-here" in reason
    assert source == "system" or "WARNING" in output


COUNT = """
import ctypes, os
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    if not os.environ.get(name):
        os.environ.pop(name, None)
from engine.worker import blas
count = ctypes.CDLL(blas.preload().path).scipy_openblas_get_num_threads
counts = [count()]
with blas.all_cores():
    counts.append(count())
print(json.dumps([*counts, count()]))
"""


@pytest.mark.parametrize("omp", ["", "1"])
def test_decode_steps_use_half_of_the_cores_and_prompts_all(omp):
    num_cores = os.cpu_count() or 1
    half = max(1, num_cores // 2)
    assert run(COUNT, OPENBLAS_NUM_THREADS="", OMP_NUM_THREADS=omp)[0] == [half, num_cores, half]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has no second thread")
def test_the_environment_decides_how_many_threads_products_use():
    assert run(COUNT, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="1")[0] == [2, 2, 2]
