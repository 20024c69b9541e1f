"""M-RoPE positions (time, height, width) of a prompt with images or videos (Qwen2-VL, Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.multimodal import ImageInput


def mrope_positions(num_tokens: int, images: Sequence[ImageInput]) -> np.ndarray:
    """Positions of a prompt's tokens, ``[3, num_tokens]`` int32: time, height and width.

    A text token has three equal positions, one more than those of the token before. An image token has the position at
    which the image starts, plus its row (height) and column (width); a token of a video frame also adds the frame's
    time since the start of the video. The following text continues after the largest position so far.
    """
    parts: list[np.ndarray] = []
    token = position = origin = 0
    for image in images:
        text = image.offset - token
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        position += text
        origin = origin if image.continues else position
        places = np.indices((1, image.rows, image.columns)).reshape(3, -1)
        places[0] += image.time
        parts.append(origin + places)
        position = max(position, origin + max(image.time + 1, image.rows, image.columns))
        token = image.end
    rest = num_tokens - token
    parts.append(np.broadcast_to(np.arange(position, position + rest), (3, rest)))
    return np.concatenate(parts, 1).astype(np.int32)


def next_position(num_tokens: int, images: Sequence[ImageInput]) -> int:
    """Position of the token after a prompt. Can exceed the prompt's length if it contains videos."""
    token = position = origin = 0
    for image in images:
        position += image.offset - token
        origin = origin if image.continues else position
        position = max(position, origin + max(image.time + 1, image.rows, image.columns))
        token = image.end
    return position + num_tokens - token
