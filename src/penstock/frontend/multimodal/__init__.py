"""Images of prompts: fetched, decoded, resized, and placed among the prompt's tokens."""

from .chat import split_images
from .media import ImageSource, MediaLoader
from .placeholders import check_placeholders, place_images
from .processor import ImageProcessor

__all__ = ["ImageProcessor", "ImageSource", "MediaLoader", "check_placeholders", "place_images", "split_images"]
