from engine.worker import blas

blas.preload()  # before any module of this folder imports MLX
