"""Images as bytes of grey, one a pixel, as TensorFlow's `rgb_to_grayscale` computes them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fastrpb.data.dataset import DataError, Task
from fastrpb.data.drawing import draw
from fastrpb.files import first_line

_RED, _GREEN, _BLUE = (np.float32(weight) for weight in (0.2989, 0.5870, 0.1140))


def image_task(name: str, classes: tuple[str, ...], shape: tuple[int, int]) -> Task:
    """The facts of a task whose tokens are pixels, 0 to 255."""
    return Task(
        name=name,
        classes=classes,
        vocabulary=256,
        max_length=shape[0] * shape[1],
        tokenize=lambda path: grey_file(Path(path), shape),
        show=lambda tokens: draw(tokens, shape),
        image_shape=shape,
    )


def luminance(colours: np.ndarray) -> np.ndarray:
    """(..., 3) uint8 colours → (...) uint8: 255.5·(0.2989 r + 0.5870 g + 0.1140 b), r g b in 0..1.

    All in float32 and cut, not rounded: Pillow's own conversion differs on a quarter of the pixels.

    >>> luminance(np.array([[255, 255, 255], [200, 100, 50]], dtype=np.uint8))
    array([255, 124], dtype=uint8)
    """
    red, green, blue = np.moveaxis(colours.astype(np.float32) * np.float32(1 / 255), -1, 0)
    grey = (red * _RED + green * _GREEN + blue * _BLUE) * np.float32(255.5)
    return grey.astype(np.uint8)


def grey(blob: bytes, shape: tuple[int, int], where: object) -> bytes:
    """The pixels of an encoded image, row by row; `where` names it in an error."""
    try:
        with Image.open(io.BytesIO(blob)) as image:
            # Before decoding, so that a huge one is refused at no cost.
            if (image.height, image.width) != shape:
                raise DataError(
                    f"{where}: the image is {image.height}×{image.width}, not "
                    f"{shape[0]}×{shape[1]}; resize it first"
                )
            _check_pixels(image, where)
            if image.mode == "L":
                return image.tobytes()
            return luminance(np.asarray(image.convert("RGB"))).tobytes()
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{where}: not a readable image (of no known format)") from None
    except Exception as error:  # Pillow's readers of damaged files raise nearly everything
        raise DataError(f"{where}: not a readable image ({first_line(error)})") from error


def grey_cell(shape: tuple[int, int], cell: object, where: str) -> bytes:
    """`grey` of an image in a table: its bytes, or the Hub's struct around them."""
    blob = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(blob, bytes):
        raise DataError(f"{where}: there are no bytes of an image, but {type(blob).__name__}")
    return grey(blob, shape, where)


def _check_pixels(image: Image.Image, where: object) -> None:
    """Refuse what has no one grey of 8 bits: what shines through, and finer numbers."""
    if image.mode == "F" or image.mode.startswith("I"):
        raise DataError(f"{where}: the image has over 8 bits a channel; save it with 8 bits first")
    if image.has_transparency_data:
        lowest = image.convert("RGBA").getchannel("A").getextrema()[0]
        if lowest != 255:
            raise DataError(
                f"{where}: the image has transparent pixels; put it onto a background first"
            )


def grey_file(path: Path, shape: tuple[int, int]) -> bytes:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the image {path}: {error.strerror}") from error
    return grey(blob, shape, path)
