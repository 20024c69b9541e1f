"""Decoding of untrusted audio files with PyAV, in a separate process
(``python -m penstock.frontend.speech.audio_decoding``). Without PyAV, WAV files are decoded with the standard library.
"""

from __future__ import annotations

import importlib.util
import io
import wave
from typing import Any

import msgspec
import numpy as np

from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.isolated_decoding import MAX_MEMORY, decode_isolated, serve_one

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,ogg,mp3,wav,flac,aac,aiff,amr,mpeg,mpegts,w64"
"""FFmpeg's names of the supported containers. Playlists are excluded, since they can refer to other files."""
FULL_SCALE = 2**15


class Request(msgspec.Struct, frozen=True):
    """Request to the decoding process, followed by the file."""

    sampling_rate: int
    max_seconds: float
    timeout: float
    """Limit of processor time in seconds."""


class Decoded(msgspec.Struct, frozen=True):
    """Reply of the decoding process: a failure, or mono samples, int16."""

    failure: Failure | None = None
    samples: bytes = b""


def decode_audio(data: bytes, sampling_rate: int, max_seconds: float, timeout: float) -> np.ndarray:
    """Decode an audio file, or the sound of a video, to mono samples ``[samples]`` float32 from -1 to 1.

    Args:
        sampling_rate: samples per second of the result.
        max_seconds: limit of the recording's duration in seconds.
        timeout: limit of the decoding time in seconds.

    Raises ``PenstockError``: ``invalid`` for an unsupported format, a damaged file, a file without sound, or an
    exceeded limit; ``unsupported`` without PyAV for files other than 16-bit WAV of this sampling rate.
    """
    request = Request(sampling_rate, max_seconds, timeout)
    if importlib.util.find_spec("av") is None:
        samples = _decode_wav(data, request)
    else:
        module = "penstock.frontend.speech.audio_decoding"
        decoded = decode_isolated(module, request, data, Decoded, "audio", timeout)
        if decoded.failure:
            raise PenstockError.of(decoded.failure)
        samples = decoded.samples
    if not samples:
        raise invalid("audio", "has no sound: send a file with an audio stream")
    return np.frombuffer(samples, np.int16).astype(np.float32) / FULL_SCALE


def _decode_wav(data: bytes, request: Request) -> bytes:
    """Decode a 16-bit WAV file to mono int16 samples."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            if file.getnframes() > request.max_seconds * max(rate, 1):
                raise _too_long(request)
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, OverflowError) as error:
        raise _needs_av(f"it is not a WAV file ({error!r:.60})") from error
    if (width, rate) != (2, request.sampling_rate) or channels < 1:
        form = f"{8 * width} bits and {rate} Hz, not 16 bits and {request.sampling_rate} Hz"
        raise _needs_av(f"it is a WAV file with {form}")
    whole = np.frombuffer(content[: len(content) // (2 * channels) * 2 * channels], "<i2")
    mixed: bytes = whole.reshape(-1, channels).mean(1).astype(np.int16).tobytes()
    return mixed


def _needs_av(reason: str) -> PenstockError:
    message = f"audio: decoding needs PyAV, which is not installed (pip install 'penstock-llm[audio]'): {reason}"
    return PenstockError(Code.UNSUPPORTED, message, "audio")


def _too_long(request: Request) -> PenstockError:
    message = f"is longer than {request.max_seconds:g} seconds (max_audio_duration)"
    return invalid("audio", message, request.max_seconds)


# --- Decoding process ------------------------------------------------------------------------------------------------


def _reply(data: bytes, request: Request) -> Decoded:
    from av.error import FFmpegError

    try:
        return Decoded(None, _decode(data, request))
    except PenstockError as error:
        return Decoded(error.failure)
    except MemoryError:
        return Decoded(invalid("audio", f"needs more than {MAX_MEMORY >> 30} GiB of memory to decode").failure)
    except (FFmpegError, ValueError, OverflowError) as error:
        return Decoded(invalid("audio", f"is damaged, or in an unsupported format: {error!r:.100}").failure)


def _decode(data: bytes, request: Request) -> bytes:
    import av

    parts: list[bytes] = []
    remaining = 2 * int(request.max_seconds * request.sampling_rate)  # in bytes, two per sample
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise invalid("audio", "has no sound: send a file with an audio stream")
        resampler: Any = av.AudioResampler(format="s16", layout="mono", rate=request.sampling_rate)
        for frame in _frames_and_end(container):
            for resampled in resampler.resample(frame):
                parts.append(resampled.to_ndarray().tobytes())
                remaining -= len(parts[-1])
                if remaining < 0:
                    raise _too_long(request)
    return b"".join(parts)


def _frames_and_end(container: Any) -> Any:
    """Frames of the first audio stream, then None, which flushes a resampler."""
    yield from container.decode(container.streams.audio[0])
    yield None


if __name__ == "__main__":
    serve_one(Request, lambda request: request.timeout, _reply)
