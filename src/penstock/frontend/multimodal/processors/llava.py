"""Image processors of LLaVA 1.5 (one square) and LLaVA-OneVision (a square thumbnail and tiles)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.anyres import Anyres, read_anyres
from penstock.core import Code, PenstockError
from penstock.core.multimodal import ImageInput

from ..decoding import to_rgb
from ..prompts import ImageProcessor, ProcessorFiles, Reader
from ..tiles import CLIP, HALF, Pixel, Resizing, check_kwargs, read_edges, read_resizing
from .pixtral import read_pixtral

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")


@dataclass(frozen=True)
class LlavaProcessor(ImageProcessor):
    """Resizes images to one square, with padding or a center crop (LLaVA 1.5)."""

    shortest_edge: int
    """Shorter side in pixels of the resized image before the center crop; 0: resize to a square, do not crop."""
    edge: int
    """Width and height of the encoder's input in pixels."""
    num_features: int
    pad: bool
    """Pad images to squares before they are resized."""
    resizing: Resizing

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> LlavaProcessor:
        check_kwargs(kwargs, ())
        return self

    def __call__(self, image: Image, num_images: int = 1) -> ImageInput:
        image = to_rgb(image)
        if self.pad:
            image = padded_to_square(image, self.resizing)
        height = width = self.edge
        if self.shortest_edge:
            shorter = min(image.height, image.width)
            height, width = (self.shortest_edge * each // shorter for each in (image.height, image.width))
        self.resizing.check(1, height, width)
        image = self.resizing.resize(image, height, width)
        top, left = (height - self.edge) // 2, (width - self.edge) // 2
        tile = image.crop((left, top, left + self.edge, top + self.edge))
        return self.resizing.image_input([tile], num_features=self.num_features)


def padded_to_square(image: Image, resizing: Resizing) -> Image:
    """Center an image on a square of the mean color."""
    from PIL import Image as pillow

    edge = max(image.size)
    resizing.check(1, edge, edge)
    red, green, blue = (int(channel * 255) for channel in resizing.mean)
    square = pillow.new("RGB", (edge, edge), (red, green, blue))
    square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
    return square


def read_llava(files: ProcessorFiles) -> ImageProcessor:
    config, given = files.config, files.image_processor
    vision = config["vision_config"]
    if vision.get("model_type") == "pixtral":
        return read_pixtral(files)
    siglip = vision.get("model_type") == "siglip_vision_model"
    colours: tuple[Pixel, Pixel] = HALF if "Siglip" in str(given.get("image_processor_type")) else CLIP
    edge, grid = int(vision["image_size"]), int(vision["image_size"]) // int(vision["patch_size"])
    size, crop = given.get("size"), given.get("do_center_crop")
    shortest = int(size.get("shortest_edge") or 0) if isinstance(size, Mapping) else int(size or 0)
    cut = read_edges(given.get("crop_size"), shortest or edge) if crop or (crop is None and not siglip) else None
    resized = cut if shortest else read_edges(size, edge)
    if resized != (edge, edge) or (cut or resized) != (edge, edge) or 0 < shortest < edge:
        message = f"{files.folder} has an image processor for {resized or size}, and an encoder for {edge} pixels: "
        message += "both must be equal"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    skipped = config["vision_feature_select_strategy"] == "default"
    return LlavaProcessor(
        placeholder=int(config["image_token_index"]),
        shortest_edge=shortest,
        edge=edge,
        num_features=grid**2 + (not siglip) - skipped,
        pad=bool(given.get("do_pad")),
        resizing=read_resizing(files, KINDS, colours),
    )


@dataclass(frozen=True)
class OneVisionProcessor(ImageProcessor):
    """Resizes images to a square thumbnail and square tiles (LLaVA-OneVision)."""

    anyres: Anyres
    resizing: Resizing

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> OneVisionProcessor:
        check_kwargs(kwargs, ())
        return self

    def __call__(self, image: Image, num_images: int = 1) -> ImageInput:
        """Resize the image to a thumbnail, followed by tiles of the image if the prompt has no other image."""
        from PIL import Image as pillow

        if num_images > 1:
            return self._whole(image)

        anyres, resizing = self.anyres, self.resizing
        edge, grid = anyres.edge, anyres.grid
        height, width = anyres.best_resolution(image.height, image.width)
        rows, columns = height // edge, width // edge
        resizing.check(1 + rows * columns, edge, edge)
        image = to_rgb(image)
        new_height, new_width = _fitted(image.height, image.width, height, width)
        canvas = pillow.new("RGB", (width, height))
        corner = (width - new_width) // 2, (height - new_height) // 2
        canvas.paste(resizing.resize(image, new_height, new_width), corner)
        tiles = [resizing.resize(image, edge, edge)]
        for top, left in product(range(0, height, edge), range(0, width, edge)):
            tiles.append(canvas.crop((left, top, left + edge, top + edge)))
        features = anyres.features(image.height, image.width, (rows, columns)).size
        return resizing.image_input(
            tiles,
            num_features=grid**2 + features[0] * (features[1] + 1),
            grid=(rows, columns),
            original_size=(image.height, image.width),
        )

    def _whole(self, image: Image) -> ImageInput:
        image, edge = padded_to_square(to_rgb(image), self.resizing), self.anyres.edge
        tile = self.resizing.resize(image, edge, edge)
        return self.resizing.image_input([tile], num_features=self.anyres.grid**2 + 1)


def _fitted(height: int, width: int, largest_height: int, largest_width: int) -> tuple[int, int]:
    """Largest height and width within limits, with the same aspect ratio."""
    across, down = largest_width / width, largest_height / height
    if across < down:
        return min(-int(-(height * across) // 1), largest_height), largest_width
    return largest_height, min(-int(-(width * down) // 1), largest_width)


def read_onevision(files: ProcessorFiles) -> OneVisionProcessor:
    given, anyres = files.image_processor, read_anyres(files.config)
    size, pinpoints = read_edges(given.get("size"), 384), given.get("image_grid_pinpoints")
    if size != (anyres.edge, anyres.edge) or given.get("do_center_crop") or given.get("crop_size"):
        message = (
            f"{files.folder} has an image processor for tiles of {size}, and an encoder for {anyres.edge} pixels: "
        )
        message += "both must be equal"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if pinpoints is not None and tuple(map(tuple, pinpoints)) != anyres.resolutions:
        message = f"{files.folder} has different image_grid_pinpoints for the image processor and the encoder: "
        message += "both must be equal"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return OneVisionProcessor(
        placeholder=int(files.config["image_token_index"]),
        anyres=anyres,
        resizing=read_resizing(files, ("LlavaOnevisionImageProcessor",)),
    )


READERS: dict[str, Reader] = {
    "LlavaForConditionalGeneration": read_llava,
    "LlavaOnevisionForConditionalGeneration": read_onevision,
}
