"""The toy model's pictures, as files."""

import pytest

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.image_header import read_header
from trioengine.testing.toy_model import toy_decode, toy_file
from trioengine.worker.scheduling.images import ImageError


@pytest.mark.parametrize(("value", "format"), [(7, ImageFormat.PNG), (255, ImageFormat.JPEG)])
def test_a_file_has_a_header_and_the_size_of_its_pixels(value, format):
    data = toy_file(16, 4, value)
    assert read_header(data) == ImageInfo(format, 16, 4)
    assert len(data) == 16 * 4 * 3


def test_a_file_of_the_value_255_cannot_be_decoded():
    assert toy_decode(memoryview(toy_file(8, 8, 7)), ImageInfo(ImageFormat.PNG, 8, 8)).tiles
    with pytest.raises(ImageError):
        toy_decode(memoryview(toy_file(8, 8, 255)), ImageInfo(ImageFormat.JPEG, 8, 8))
