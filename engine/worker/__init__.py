import os
import sys

from engine.gpus import see_one_gpu
from engine.worker import blas

see_one_gpu()
if sys.platform == "linux":  # CUDA: a step's graphs end after so many operations, not after some weights
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "100")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "100000")
blas.preload()  # before any module of this folder imports MLX
