"""Images and videos of prompts: fetched, decoded, resized, and placed among the prompt's tokens."""

from .chat import move_tool_media, split_media
from .media import IMAGE, VIDEO, MediaLoader, MediaSource
from .placeholders import Media, Placeholders
from .prompts import ImageProcessor
