"""All options of media loading: defaults, units and bounds."""

from pydantic import Field

from engine.config import Frozen


class MediaConfig(Frozen):
    """Limits on the images and videos of requests: their number, size, download and decoding."""

    max_images: int = Field(default=16, ge=1, description="most images and videos in one request")
    max_bytes: int = Field(default=20 * 2**20, ge=1024, description="largest encoded image or video in bytes")
    max_pixels: int = Field(
        default=40_000_000, ge=1024, description="largest decoded image or frame in pixels, width times height"
    )
    max_video_frames: int = Field(
        default=64,
        ge=2,
        le=512,
        description="most frames that are read of one video; of longer ones as many, further apart",
    )
    max_image_tokens: int | None = Field(
        default=None,
        ge=4,
        description="larger images are resized to this many tokens; null: as recommended by the model's image "
        "processor, limited so that four of the largest images fit into one request (60 MiB after resizing)",
    )
    decode_cpu_s: float = Field(
        default=10.0,
        gt=0,
        description="CPU seconds for decoding one image or video; those that need more are rejected (400)",
    )
    decode_memory_mb: int = Field(
        default=1024,
        ge=64,
        description="MiB of memory for decoding one image or video; those that need more are rejected (400)",
    )
    decode_budget_mb: int = Field(
        default=256,
        ge=1,
        description="MiB of images decoded concurrently on a node, at 4 bytes per pixel; others wait",
    )
    fetch_timeout_s: float = Field(
        default=10.0, gt=0, description="seconds for downloading one image or video, redirects included"
    )
    max_redirects: int = Field(default=3, ge=0, description="most redirects that a download follows")
    allow_http: bool = Field(
        default=True,
        description="fetch http: URLs as well; false: only https:, which cannot be read or changed in transit",
    )
    allowed_private_hosts: tuple[str, ...] = Field(
        default=(), description="private host names or addresses from which images may be fetched"
    )
