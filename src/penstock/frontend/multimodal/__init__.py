"""Images and videos in prompts: fetching, decoding, resizing, and placeholder tokens."""

from .chat import move_tool_media, split_media
from .media import IMAGE, VIDEO, MediaLoader, MediaSource
from .placeholders import Media, Placeholders
from .prompts import ImageProcessor
