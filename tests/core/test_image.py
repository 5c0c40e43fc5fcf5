"""Images in messages and data URLs, and their tiles: sizes and texts as transformers has them."""

import base64
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trioengine.core import image as image_module
from trioengine.core.errors import RequestRejected
from trioengine.core.image import (
    MAX_EDGE,
    Image,
    ImageFormat,
    ImageGrid,
    ImageInfo,
    ImageProcessing,
    image_url,
    is_image_part,
    parse_data_url,
)

WHERE = "messages[0].content[1]"


def url_of(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def refusal(function, *args, **options):
    with pytest.raises(RequestRejected) as caught:
        function(*args, **options)
    return caught.value


@given(st.binary(max_size=3000), st.integers(1, 99))
def test_data_comes_back(data, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_module, "_CHUNK", 4 * chunk)
        assert parse_data_url(url_of(data), len(data)) == ("image/png", data)
        if data:
            error = refusal(parse_data_url, url_of(data), len(data) - 1, where=WHERE)
            assert (error.code, error.param) == ("image_file_too_large", WHERE)
            assert error.message == f"{WHERE}: the data has {len(data)} bytes; at most {len(data) - 1} are accepted"


@pytest.mark.parametrize("head", ["DATA:IMAGE/PNG;BASE64,", "data:image/png;name=a.png;base64,"])
def test_letter_case_and_parameters(head):
    assert parse_data_url(f"{head}QUJD", 9) == ("image/png", b"ABC")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "HTTPS://a/b", "file:///etc/passwd", "ftp://a", "a.png", "", "dat"]
)
def test_nothing_is_fetched(url):
    error = refusal(parse_data_url, url, 9)
    assert error.message == "image_url: only data: URLs are accepted; the server fetches nothing"
    assert (error.code, error.param) == ("invalid_image_url", "image_url")


@pytest.mark.parametrize(
    "url",
    ["data:", "data:image/png;base64", "data:image/png,QUJD", "data:base64,QUJD", "data:" + "x" * 999 + ";base64,QUJD"],
)
def test_other_data_urls(url):
    error = refusal(parse_data_url, url, 9)
    assert error.message == "image_url: a data: URL must begin with data:<media type>;base64,"


BAD_BASE64 = ["QUJ", "QUI=QUJD", "QQ==QQ==", "====", "Q===", "QU D", "QUJ\n", "QU-_", "QUJDé", "QUJ\ud800", "QUJD%3D"]


@pytest.mark.parametrize("text", BAD_BASE64, ids=ascii)
def test_what_is_not_base64(text):
    error = refusal(parse_data_url, f"data:image/png;base64,{text}", 99)
    assert (error.code, error.message) == ("invalid_base64_image", "image_url: the data is not base64")


@given(st.text("QUJD=+/-_ \n", max_size=12), st.integers(1, 2))
def test_base64_is_strict(text, chunk):
    """Accepted data encodes to the same text, except for the unused bits of the last character."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_module, "_CHUNK", 4 * chunk)
        try:
            _, data = parse_data_url(f"data:;base64,{text}", 99)
        except RequestRejected:
            with pytest.raises(ValueError, match=r"base64|data|padding|Padding|characters"):
                base64.b64decode(text if len(text) % 4 == 0 else "!", validate=True)
        else:
            again = base64.b64encode(data).decode()
            kept = len(text.rstrip("=")) - 1
            assert (again[:kept], again.count("="), len(again)) == (text[:kept], text.count("="), len(text))


def peak(function, *args):
    tracemalloc.start()
    try:
        function(*args)
    except RequestRejected:
        pass
    finally:
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return size


def test_memory():
    """A text that is too long costs nothing, another one twice its data."""
    data = bytes(10_000_000)
    url = url_of(data)
    assert peak(parse_data_url, url, len(data) - 1) < 100_000
    assert peak(parse_data_url, url, len(data)) < 2.1 * len(data)


# ---- parts --------------------------------------------------------------------------------------------------------

URL = "data:image/png;base64,QUJD"


@pytest.mark.parametrize("detail", [{}, {"detail": "low"}, {"detail": "auto"}, {"detail": "high"}, {"detail": None}])
def test_urls_of_parts(detail):
    assert image_url({"type": "image_url", "image_url": {"url": URL, **detail}}, WHERE) == URL
    assert image_url({"type": "input_image", "image_url": URL, **detail}, WHERE) == URL
    assert image_url({"type": "text", "text": "a", **detail}, WHERE) is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "{}.image_url must be an object with a url, got None"),
        ({"type": "image_url", "image_url": URL[:9]}, "{}.image_url must be an object with a url, got 'data:imag'"),
        ({"type": "image_url", "image_url": {"url": 5}}, "{}.image_url.url must be a string, got 5"),
        ({"type": "input_image", "file_id": "a"}, "{}.image_url must be a string, got None"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "best"}},
            "{}.image_url.detail must be auto, low, high or original, got 'best'",
        ),
        (
            {"type": "input_image", "image_url": URL, "detail": []},
            "{}.detail must be auto, low, high or original, got []",
        ),
    ],
)
def test_parts_without_a_url(part, message):
    error = refusal(image_url, part, WHERE)
    message = message.format(WHERE)
    assert (error.code, error.message, error.param) == ("invalid_value", message, message.split()[0])


def test_images_are_known_by_identity():
    info = ImageInfo(ImageFormat.PNG, 5, 3)
    image, twin = Image(info, handle=[1]), Image(info, handle=[1])
    assert image != twin
    assert len({image, twin}) == 2
    assert image.part == {"type": "image", "image": image}
    assert image.part != twin.part
    assert repr(image) == f"Image(info={info!r})"  # a handle may hold the bytes
    assert is_image_part(image.part)
    assert not any(map(is_image_part, ["image", {"type": "image"}, {"type": "text", "image": image}, image]))


REFERENCE = json.loads(Path(__file__).parents[1].joinpath("data/image_grid_reference.json").read_text())
TOKENS = 2


def processing(tile, edge, splits=True):
    half = (0.5, 0.5, 0.5)
    return ImageProcessing("<image>", 7, TOKENS, tile, edge, splits, half, half)


@pytest.fixture(params=REFERENCE)
def case(request):
    return REFERENCE[request.param]


def test_grids_are_those_of_transformers(case):
    images = processing(case["tile"], case["edge"], case["splits"])
    for width, height, rows, columns, *sizes in case["grids"]:
        assert images.grid(width, height) == ImageGrid(rows, columns, tuple(sizes[:2]), tuple(sizes[2:]))


def test_texts_are_those_of_transformers(case):
    images = processing(case["tile"], case["edge"], case["splits"])
    assert [images.prompt_text(*row[:2]) for row in case["grids"][: len(case["texts"])]] == case["texts"]


EDGES = st.integers(1, 100_000)


@given(EDGES, EDGES, st.integers(1, 600), st.integers(1, 6000), st.booleans())
@example(1, 249, 1, 249, True)
def test_any_image(width, height, tile, edge, splits):
    """Tiles fill the resized image, an image token stands for each token of a tile, and the tiles are bounded."""
    images = processing(tile, edge, splits)
    grid = images.grid(width, height)
    assert min(grid.scaled) >= 1
    assert max(grid.scaled) <= MAX_EDGE
    assert grid.resized == (max(grid.columns, 1) * tile, max(grid.rows, 1) * tile)
    assert max(grid.resized) < max(grid.scaled) + 2 * tile
    assert (grid.rows == 0) == (grid.columns == 0)
    assert images.num_tiles(width, height) == grid.num_tiles
    if grid.num_tiles < 200:
        assert images.prompt_text(width, height).count("<image>") == grid.num_tiles * TOKENS
