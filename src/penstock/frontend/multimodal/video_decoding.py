"""Decoding of video files, which are not trusted, with PyAV in a process of its own
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
"""FFmpeg's names of the containers that are read. None of them refers to other files, as playlists do."""
TOLERANCE = 0.05
"""Share of a video's frames that may be missing at its end, in whose place the last one stands."""


class Request(msgspec.Struct, frozen=True):
    """What the process is asked; the file follows."""

    processor: VideoProcessor
    max_pixels: int
    """Of a frame of the file."""
    timeout: float
    """Seconds of processor time."""


class Decoded(msgspec.Struct, frozen=True):
    """The reply: a failure, or the chosen frames, resized."""

    failure: Failure | None = None
    frames: list[bytes] = []
    indices: list[int] = []
    total: int = 0
    fps: float = 0.0
    size: tuple[int, int] = (0, 0)


def require_av() -> None:
    """Raise ``PenstockError`` (``unsupported``) where PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        words = "video: reading one takes PyAV, which is not installed: pip install 'penstock-llm[video]'"
        raise PenstockError(Code.UNSUPPORTED, words, "video")


def decode_video(data: bytes, processor: VideoProcessor, max_pixels: int, timeout: float) -> Video:
    """Decode a video file.

    Args:
        max_pixels: of a frame of the file.
        timeout: seconds that it may take.

    Raises ``PenstockError`` with one sentence: ``invalid`` for another format, a damaged file, and what exceeds a
    limit; ``unsupported`` where PyAV is not installed.
    """
    require_av()
    request = Request(processor, max_pixels, timeout)
    module = "penstock.frontend.multimodal.video_decoding"
    decoded = decode_isolated(module, request, data, Decoded, "video", timeout)
    if decoded.failure:
        raise PenstockError.of(decoded.failure)
    return processor(decoded.frames, decoded.size, decoded.indices, decoded.total, decoded.fps)


# --- In the other process --------------------------------------------------------------------------------------------


def main() -> None:
    serve_one(Request, lambda request: request.timeout, _reply)


def _reply(data: bytes, request: Request) -> Decoded:
    from av.error import FFmpegError

    try:
        return _decode(data, request)
    except PenstockError as error:
        return Decoded(error.failure)
    except MemoryError:
        return Decoded(invalid("video", f"takes more than {MAX_MEMORY >> 30} GiB of memory to decode").failure)
    except (FFmpegError, ValueError, OverflowError) as error:
        return Decoded(invalid("video", f"is a damaged video, or in a format that is not read: {error!r:.100}").failure)


def _decode(data: bytes, request: Request) -> Decoded:
    processor = request.processor
    with _open(data) as container:
        stream = _video_stream(container, request.max_pixels)
        total = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not total or not 0 < fps < 1e6:
        raise invalid("video", "is a damaged video: it has no frames, or no frame rate")
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
        raise invalid("video", f"is a damaged video: {number + 1} of its {total} frames can be read")
    return Decoded(None, [*frames, *frames[-1:] * missing], indices, total, fps, size)


def _open(data: bytes) -> Any:
    import av

    return av.open(io.BytesIO(data), options={"format_whitelist": FORMATS, "protocol_whitelist": "none"})


def _video_stream(container: Any, max_pixels: int) -> Any:
    if not container.streams.video:
        raise invalid("video", "has sound alone")
    stream = container.streams.video[0]
    if (count := stream.width * stream.height) > max_pixels or not count:
        words = f"has frames of {stream.width} x {stream.height} pixels, and at most {max_pixels} are taken"
        raise invalid("video", f"{words} (max_image_pixels)", max_pixels)
    stream.codec_context.options = {"max_pixels": str(max_pixels)}  # of later frames, too
    return stream


def _upright(frame: Any) -> Image:
    """A frame as it is to be shown."""
    import numpy as np
    from PIL import Image as pillow

    pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
    return pillow.fromarray(np.ascontiguousarray(pixels))


if __name__ == "__main__":
    main()
