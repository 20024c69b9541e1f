"""Log-mel features of audio, as in Whisper (Radford et al., 2022, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.core.errors import invalid

CONFIGS = ("processor_config.json", "preprocessor_config.json")
"""Files with the configuration. The first file has it under the key ``feature_extractor`` or ``audio_processor``."""
LOGARITHMIC_FROM = 1000.0
"""Frequency in hertz (15 mels) up to which Slaney's mel scale is linear."""
MELS_PER_HERTZ = 3 / 200
STEP = 27 / np.log(6.4)
"""Mels per factor of e in frequency above ``LOGARITHMIC_FROM``."""
MEL_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0
"""Range of the features below their maximum, in powers of ten."""


@dataclass(frozen=True)
class LogMelFeatures:
    """Computes log-mel features of audio. Fields are named as in ``preprocessor_config.json``."""

    feature_size: int = 80
    """Number of mel bins."""
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    chunk_length: int = 30
    """Duration of a window in seconds."""

    @property
    def num_samples(self) -> int:
        """Number of samples of a window."""
        return self.chunk_length * self.sampling_rate

    @property
    def num_frames(self) -> int:
        """Number of frames of a window."""
        return self.num_samples // self.hop_length

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Compute the features of a recording, ``[feature_size, frames]`` float32. Recordings shorter than a window are
        padded with silence.

        Args:
            samples: ``[samples]`` float32 from -1 to 1.
        """
        count = max(len(samples), self.num_samples)
        padded = np.pad(np.pad(samples, (0, count - len(samples))), self.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        logs = np.empty((self.feature_size, count // self.hop_length), np.float32)
        for start in range(0, logs.shape[1], self.num_frames):
            window = slice(start, min(start + self.num_frames, logs.shape[1]))
            power = np.abs(np.fft.rfft(frames[window].astype(np.float64) * self._window)) ** 2
            logs[:, window] = np.log10(np.maximum(self._filters @ power.T, MEL_FLOOR))
        result: np.ndarray = (np.maximum(logs, logs.max() - DYNAMIC_RANGE) + 4) / 4
        return result

    def window(self, features: np.ndarray, start: int) -> np.ndarray:
        """Window of a recording's features from frame ``start`` on, ``[feature_size, num_frames]``, padded with
        silence."""
        window = features[:, start : start + self.num_frames]
        silence = max((np.log10(MEL_FLOOR) + 4) / 4, features.max() - DYNAMIC_RANGE / 4)
        missing = self.num_frames - window.shape[1]
        return np.ascontiguousarray(np.pad(window, ((0, 0), (0, missing)), constant_values=silence))

    @cached_property
    def _window(self) -> np.ndarray:
        """Periodic Hann window."""
        return np.hanning(self.n_fft + 1)[:-1]

    @cached_property
    def _filters(self) -> np.ndarray:
        """Triangular filters of equal area on Slaney's mel scale, ``[feature_size, n_fft / 2 + 1]`` float64."""
        frequencies = np.linspace(0, self.sampling_rate // 2, 1 + self.n_fft // 2)
        corners = _hertz(np.linspace(0, _mels(8000.0), self.feature_size + 2))
        slopes = corners[:, None] - frequencies
        widths = np.diff(corners)[:, None]
        triangles = np.maximum(0, np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]))
        result: np.ndarray = triangles * 2 / (corners[2:] - corners[:-2])[:, None]
        return result


def read_log_mel_features(folder: Path) -> LogMelFeatures:
    """Read the feature configuration of a checkpoint. Raises ``PenstockError`` (``invalid``) if
    ``preprocessor_config.json`` is missing, malformed, or of an unsupported model."""
    path = folder / CONFIGS[0]
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
        features = given.get("feature_extractor") or given.get("audio_processor")
        if not features:
            path = folder / CONFIGS[1]
            features = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return _read(features)
    except OSError as error:
        raise invalid("model", f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has no supported audio features: {error}") from error


def _read(given: Mapping[str, Any]) -> LogMelFeatures:
    if (kind := given.get("feature_extractor_type")) != "WhisperFeatureExtractor":
        raise ValueError(f"feature_extractor_type is {kind!r:.60}, only WhisperFeatureExtractor is supported")
    for name, value in (("padding_value", 0.0), ("dither", 0.0)):
        if given.get(name, value) != value:
            raise ValueError(f"{name} is {given[name]}, only {value:g} is supported")
    names = ("feature_size", "sampling_rate", "hop_length", "n_fft", "chunk_length")
    features = LogMelFeatures(**{name: int(given[name]) for name in names if name in given})
    limits = {"feature_size": 1024, "sampling_rate": 96_000, "hop_length": 8192, "n_fft": 8192, "chunk_length": 120}
    for name, limit in limits.items():
        if not 1 <= (number := getattr(features, name)) <= limit:
            raise ValueError(f"{name} is {number}, and must be from 1 to {limit}")
    return features


def _mels(hertz: float) -> float:
    if hertz < LOGARITHMIC_FROM:
        return hertz * MELS_PER_HERTZ
    return float(LOGARITHMIC_FROM * MELS_PER_HERTZ + np.log(hertz / LOGARITHMIC_FROM) * STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    first = LOGARITHMIC_FROM * MELS_PER_HERTZ
    return np.where(mels < first, mels / MELS_PER_HERTZ, LOGARITHMIC_FROM * np.exp((mels - first) / STEP))
