"""Decoding of untrusted video files with PyAV, in a separate process
(``python -m penstock.frontend.multimodal.video_decoding``)."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.isolated_decoding import MAX_MEMORY, decode_isolated, serve_one

from .video import Video, VideoProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,ogg,mpeg,mpegts,gif,apng"
"""FFmpeg's names of the supported containers. Playlists are excluded, since they can refer to other files."""
TOLERANCE = 0.05
"""Largest fraction of frames that may be missing at the end. Copies of the last frame replace missing frames."""


class Request(msgspec.Struct, frozen=True):
    """Request to the decoding process, followed by the file."""

    processor: VideoProcessor
    max_pixels: int
    """Largest number of pixels of a frame in the file."""
    timeout: float
    """Limit of processor time in seconds."""


class Decoded(msgspec.Struct, frozen=True):
    """Reply of the decoding process: a failure, or the sampled and resized frames."""

    failure: Failure | None = None
    frames: list[bytes] = []
    indices: list[int] = []
    total: int = 0
    fps: float = 0.0
    size: tuple[int, int] = (0, 0)


def require_av() -> None:
    """Raise ``PenstockError`` (``unsupported``) if PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        message = "video: decoding needs PyAV, which is not installed: pip install 'penstock-llm[video]'"
        raise PenstockError(Code.UNSUPPORTED, message, "video")


def decode_video(data: bytes, processor: VideoProcessor, max_pixels: int, timeout: float) -> Video:
    """Decode a video file.

    Args:
        max_pixels: largest number of pixels of a frame in the file.
        timeout: time limit in seconds.

    Raises ``PenstockError``: ``invalid`` for an unsupported format, a damaged file, or an exceeded limit;
    ``unsupported`` if PyAV is not installed.
    """
    require_av()
    request = Request(processor, max_pixels, timeout)
    module = "penstock.frontend.multimodal.video_decoding"
    decoded = decode_isolated(module, request, data, Decoded, "video", timeout)
    if decoded.failure:
        raise PenstockError.of(decoded.failure)
    return processor(decoded.frames, decoded.size, decoded.indices, decoded.total, decoded.fps)


# --- Decoding process ------------------------------------------------------------------------------------------------


def main() -> None:
    serve_one(Request, lambda request: request.timeout, _reply)


def _reply(data: bytes, request: Request) -> Decoded:
    from av.error import FFmpegError

    try:
        return _decode(data, request)
    except PenstockError as error:
        return Decoded(error.failure)
    except MemoryError:
        return Decoded(invalid("video", f"needs more than {MAX_MEMORY >> 30} GiB of memory to decode").failure)
    except (FFmpegError, ValueError, OverflowError) as error:
        return Decoded(invalid("video", f"is damaged, or in an unsupported format: {error!r:.100}").failure)


def _decode(data: bytes, request: Request) -> Decoded:
    processor = request.processor
    with _open(data) as container:
        stream = _video_stream(container, request.max_pixels)
        total = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not total or not 0 < fps < 1e6:
        raise invalid("video", "is damaged: it has no frames, or no frame rate")
    indices = processor.sample(total, fps)
    size = (0, 0)
    frames: list[bytes] = []
    with _open(data) as container:
        number = -1
        for number, frame in enumerate(container.decode(_video_stream(container, request.max_pixels))):
            if number != indices[len(frames)]:
                continue
            image = _upright(frame)
            size = size if frames else processor.size(len(indices), image.height, image.width)
            frames.append(processor.resized(image, size))
            if len(frames) == len(indices):
                break
    missing = len(indices) - len(frames)
    if missing and (not frames or number + 1 < total * (1 - TOLERANCE) - 1):
        raise invalid("video", f"is damaged: only {number + 1} of its {total} frames can be decoded")
    return Decoded(None, [*frames, *frames[-1:] * missing], indices, total, fps, size)


def _open(data: bytes) -> Any:
    import av

    return av.open(io.BytesIO(data), options={"format_whitelist": FORMATS, "protocol_whitelist": "none"})


def _video_stream(container: Any, max_pixels: int) -> Any:
    if not container.streams.video:
        raise invalid("video", "has no video stream")
    stream = container.streams.video[0]
    if (count := stream.width * stream.height) > max_pixels or not count:
        message = f"has frames of {stream.width} x {stream.height} pixels, and at most {max_pixels} are allowed"
        raise invalid("video", f"{message} (max_image_pixels)", max_pixels)
    stream.codec_context.options = {"max_pixels": str(max_pixels)}  # applies the limit to every frame
    return stream


def _upright(frame: Any) -> Image:
    """Convert a frame to an image, rotated for display."""
    import numpy as np
    from PIL import Image as pillow

    pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
    return pillow.fromarray(np.ascontiguousarray(pixels))


if __name__ == "__main__":
    main()
