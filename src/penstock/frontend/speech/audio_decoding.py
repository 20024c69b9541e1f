"""Decoding of audio files, which are not trusted, with PyAV in a process of its own
(``python -m penstock.frontend.speech.audio_decoding``); WAV files with the standard library where PyAV is missing."""

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
"""FFmpeg's names of the containers that are read. None of them refers to other files, as playlists do."""
FULL_SCALE = 2**15


class Request(msgspec.Struct, frozen=True):
    """What the process is asked; the file follows."""

    sampling_rate: int
    max_seconds: float
    timeout: float
    """Seconds of processor time."""


class Decoded(msgspec.Struct, frozen=True):
    """The reply: a failure, or the samples of one channel, 16 bits each."""

    failure: Failure | None = None
    samples: bytes = b""


def decode_audio(data: bytes, sampling_rate: int, max_seconds: float, timeout: float) -> np.ndarray:
    """The samples of an audio file, or of a video's sound: all channels mixed, ``[samples]`` float32 from -1 to 1.

    Args:
        sampling_rate: samples of a second, of the result.
        max_seconds: that it may last.
        timeout: seconds that decoding may take.

    Raises ``PenstockError`` with one sentence: ``invalid`` for another format, a damaged file, one without sound, and
    what exceeds a limit; ``unsupported`` where PyAV is not installed, and the file is no WAV of this sampling rate.
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
        raise invalid("audio", "has no sound")
    return np.frombuffer(samples, np.int16).astype(np.float32) / FULL_SCALE


def _decode_wav(data: bytes, request: Request) -> bytes:
    """The samples of a WAV file of 16 bits."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            if file.getnframes() > request.max_seconds * max(rate, 1):
                raise _too_long(request)
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, OverflowError) as error:
        raise _needs_av(f"it is no WAV file ({error!r:.60})") from error
    if (width, rate) != (2, request.sampling_rate) or channels < 1:
        raise _needs_av(f"it is a WAV file of {8 * width} bits and {rate} Hz, not 16 bits and {request.sampling_rate}")
    whole = np.frombuffer(content[: len(content) // (2 * channels) * 2 * channels], "<i2")
    mixed: bytes = whole.reshape(-1, channels).mean(1).astype(np.int16).tobytes()
    return mixed


def _needs_av(why: str) -> PenstockError:
    words = f"audio: reading it takes PyAV, which is not installed (pip install 'penstock-llm[audio]'): {why}"
    return PenstockError(Code.UNSUPPORTED, words, "audio")


def _too_long(request: Request) -> PenstockError:
    words = f"lasts more than {request.max_seconds:g} seconds (max_audio_duration)"
    return invalid("audio", words, request.max_seconds)


# --- In the other process --------------------------------------------------------------------------------------------


def _reply(data: bytes, request: Request) -> Decoded:
    from av.error import FFmpegError

    try:
        return Decoded(None, _decode(data, request))
    except PenstockError as error:
        return Decoded(error.failure)
    except MemoryError:
        return Decoded(invalid("audio", f"takes more than {MAX_MEMORY >> 30} GiB of memory to decode").failure)
    except (FFmpegError, ValueError, OverflowError) as error:
        return Decoded(invalid("audio", f"is damaged, or in a format that is not read: {error!r:.100}").failure)


def _decode(data: bytes, request: Request) -> bytes:
    import av

    parts: list[bytes] = []
    left = 2 * int(request.max_seconds * request.sampling_rate)
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise invalid("audio", "has no sound")
        resampler: Any = av.AudioResampler(format="s16", layout="mono", rate=request.sampling_rate)
        for frame in _frames_and_end(container):
            for resampled in resampler.resample(frame):
                parts.append(resampled.to_ndarray().tobytes())
                left -= len(parts[-1])
                if left < 0:
                    raise _too_long(request)
    return b"".join(parts)


def _frames_and_end(container: Any) -> Any:
    """The frames of the first stream, then None, at which a resampler returns what it still has."""
    yield from container.decode(container.streams.audio[0])
    yield None


if __name__ == "__main__":
    serve_one(Request, lambda request: request.timeout, _reply)
