"""What a reference model asks of the shape of its input, and the types of its options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..errors import BadInput

Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Size, ...], Field(description="a list of whole numbers of at least 1")]


def single(shape, name: str) -> tuple[int, ...]:
    """The shape of the one input that the model `name` takes."""
    if not all(isinstance(n, int) for n in shape):
        raise BadInput(f'model.name: "{name}" takes one input, and the data have {len(shape)}')
    return tuple(shape)


def image(shape, name: str, smallest: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of the images that the model `name` takes, at least `smallest` high and wide."""
    shape = single(shape, name)
    if len(shape) != 3 or min(shape[1:]) < smallest:
        need = "images [channels, height, width]" + (f" of at least {smallest} x {smallest}" if smallest > 1 else "")
        raise BadInput(f'model.name: "{name}" takes {need}, and the data are {list(shape)}')
    return shape
