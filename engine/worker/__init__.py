import os
import sys

from engine.worker import blas

if sys.platform == "linux":  # CUDA: with the default of 100 operations per graph a step takes 10 % longer
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "400")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "100000")
blas.preload()  # before any module of this folder imports MLX
