"""VideoGrid: which frames of a video are read, their size, and their division into patches, as Qwen3-VL takes them.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from engine.processing.patch_grid import PatchGrid

UNDECODABLE = "the video could not be decoded; MP4, MOV, WebM and MKV are supported"


@dataclass(frozen=True)
class CutVideo:
    """The frames of one video in the form of the vision tower, not yet normalised."""

    patches: np.ndarray  # uint8 [groups, patches, 3 * group_frames, patch_size, patch_size], colours first
    grid_hw: tuple[int, int]  # patches along height and width
    times_s: tuple[float, ...]  # of each group, in seconds
    content_hashes: tuple[str, ...]  # of each group: sha256 hex digest over mode, size and pixels of its frames


@dataclass(frozen=True)
class VideoGrid:
    """The steps of Qwen3-VL's video processor before the normalisation of pixels.

    Source: `sample_frames`, `smart_resize` and `patchify` of transformers' Qwen3VLVideoProcessor.
    """

    patch_size: int  # pixels per side
    merge_size: int  # patches per side that share one token
    group_frames: int  # frames that share patches
    resample: int  # PIL.Image.Resampling
    min_pixels: int  # of all frames together; smaller videos are enlarged
    max_pixels: int  # of all frames together; larger videos are reduced
    fps: float  # frames that are read per second
    min_frames: int
    max_frames: int

    @property
    def factor(self) -> int:
        """Pixels per side of the square of one token."""
        return self.patch_size * self.merge_size

    @property
    def max_bytes(self) -> int:
        """Bytes of the patches of the largest video."""
        return 3 * max(self.max_pixels, self.max_frames * self.factor**2) * 2

    def limited(self, max_frames: int, max_bytes: int) -> "VideoGrid":
        """Return the same grid with at most so many frames per video, and bytes of their patches."""
        most = min(self.max_frames, max_frames)
        max_pixels = min(self.max_pixels, max_bytes // 3)
        return replace(
            self,
            max_frames=most,
            min_frames=min(self.min_frames, most),
            max_pixels=max_pixels,
            min_pixels=min(self.min_pixels, max_pixels),
        )

    def frame_indices(self, num_frames: int, fps: float) -> list[int]:
        """Return the frames to read of a video that has so many, ascending.

        Args:
            num_frames: Frames of the video.
            fps: Frames of the video per second.
        """
        num_read = min(max(int(num_frames / fps * self.fps), self.min_frames), self.max_frames, num_frames)
        return np.linspace(0, num_frames - 1, num_read).round().astype(int).tolist()

    def times_s(self, indices: list[int], fps: float) -> list[float]:
        """Return the time in seconds of each group of frames, the mean of its first and last one."""
        groups = [group + group[-1:] * (self.group_frames - len(group)) for group in self._groups(indices)]
        return [(group[0] + group[-1]) / fps / 2 for group in groups]

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which so many frames of this size are resized: multiples of `factor`."""
        factor, num_frames = self.factor, max(num_frames, self.group_frames)
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        new_width, new_height = (round(side / factor) * factor for side in (width, height))
        total = round(num_frames / self.group_frames) * self.group_frames * new_height * new_width
        if total > self.max_pixels:
            scale = math.sqrt(num_frames * height * width / self.max_pixels)
            new_width, new_height = (max(factor, math.floor(s / scale / factor) * factor) for s in (width, height))
        elif total < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (num_frames * height * width))
            new_width, new_height = (math.ceil(side * scale / factor) * factor for side in (width, height))
        return new_width, new_height

    def group_shape(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return the shape of the patches of a group of frames of this width and height, see `cut`."""
        num_patches = size[0] * size[1] // self.patch_size**2
        return num_patches, 3 * self.group_frames, self.patch_size, self.patch_size

    def num_groups(self, num_frames: int) -> int:
        return -(-num_frames // self.group_frames)

    def cut(self, frames: list[Image.Image]) -> tuple[np.ndarray, list[str]]:
        """Cut frames of the target size into patches. The last one is repeated if it stands alone in its group.

        Returns:
            uint8 [groups, patches, 3 * group_frames, patch_size, patch_size], colours first, and per group the sha256
            hex digest over mode, size and pixels of its frames.
        """
        grid = PatchGrid(self.patch_size, self.merge_size, self.resample, 1, 2**62)
        patches, digests = [], []
        for group in self._groups(frames):
            group = group + group[-1:] * (self.group_frames - len(group))
            cuts = [grid.cut(frame) for frame in group]
            stacked = np.stack([cut.patches for cut in cuts], axis=2)  # [patches, 3, group_frames, patch, patch]
            patches.append(stacked.reshape(len(stacked), -1, self.patch_size, self.patch_size))
            digests.append(hashlib.sha256("".join(cut.content_hash for cut in cuts).encode()).hexdigest())
        return np.stack(patches), digests

    def _groups(self, items: list) -> list[list]:
        return [items[start : start + self.group_frames] for start in range(0, len(items), self.group_frames)]
