"""A payload: bytes, how to read them, and every way in which the two can disagree."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import narrowcast as nc
from cases import mixed, same_bits
from narrowcast import Codec, Payload
from narrowcast.errors import DtypeError, NarrowcastError, PayloadError, ShapeError


def refused(error: type[NarrowcastError], *words: str, **changes: object) -> None:
    """A payload of 100 floats in int4, with some fields changed, is refused in these words."""
    made = nc.encode(mixed(100), "int4")
    fields = {"data": made.data, "codec": made.codec, "shape": made.shape, "dtype": made.dtype}
    with pytest.raises(error) as caught:
        Payload(**{**fields, **changes})  # type: ignore[arg-type]
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


def test_a_payload_says_what_it_is() -> None:
    payload = nc.encode(torch.randn(10, 100), "int4")
    assert payload.nbytes == payload.data.numel() == 544
    assert (payload.data.dim(), payload.data.dtype) == (1, torch.uint8)
    assert payload.device == torch.device("cpu")
    assert repr(payload) == "Payload('int4', shape=(10, 100), dtype=torch.float32, nbytes=544, device='cpu')"


def test_a_payload_is_rebuilt_from_its_fields(codec: Codec) -> None:
    x = mixed(6 * 35).view(6, 35)
    made = nc.encode(x, codec, seed=1)
    again = Payload(made.data.clone(), nc.codec(codec.spec), torch.Size((6, 35)), torch.float32)
    assert same_bits(nc.decode(again), nc.decode(made))


def test_a_payload_survives_a_pickle_and_a_copy(codec: Codec) -> None:
    made = nc.encode(mixed(100), codec, seed=1)
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert (twin.codec, twin.shape, twin.dtype) == (made.codec, made.shape, made.dtype)
        assert torch.equal(twin.data, made.data)


def test_to_moves_the_bytes(device: str) -> None:
    payload = nc.encode(mixed(100), "int4")
    moved = payload.to(device)
    assert moved.device.type == device
    assert torch.equal(moved.data.cpu(), payload.data)
    assert same_bits(nc.decode(moved).cpu(), nc.decode(payload))


def test_decode_gives_the_dtype_that_was_encoded_or_is_asked_for() -> None:
    payload = nc.encode(mixed(100, dtype=torch.bfloat16), "int8")
    assert nc.decode(payload).dtype == torch.bfloat16
    assert nc.decode(payload, dtype=torch.float64).dtype == torch.float64
    assert torch.equal(nc.decode(payload, dtype=torch.float32).bfloat16(), nc.decode(payload))


@pytest.mark.parametrize("change", [-1, -16, 1, 16, -64])
def test_truncated_and_oversized_bytes_are_refused(change: int) -> None:
    data = torch.zeros(64 + change, dtype=torch.uint8)
    refused(PayloadError, "data", "(100,)", "64 bytes", "'int4'", f"got {64 + change}", "cut or padded", data=data)


def test_a_codec_that_does_not_fit_the_bytes_is_refused() -> None:
    refused(PayloadError, "data", "'int8'", "the codec or shape is another one", codec=nc.codec("int8"))


def test_a_shape_that_does_not_fit_the_bytes_is_refused() -> None:
    refused(PayloadError, "data", "(100, 100)", "shape", shape=torch.Size((100, 100)))
    refused(PayloadError, "data", "(0,)", shape=torch.Size((0,)))


@pytest.mark.parametrize("shape", [(-1,), (-4, -25)])
def test_a_negative_shape_is_refused(shape: tuple[int, ...]) -> None:
    refused(ShapeError, f"shape={shape}", "zero or more", shape=shape)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_is_not_float_is_refused(dtype: torch.dtype) -> None:
    refused(DtypeError, "dtype", "float32, bfloat16, float16 or float64", dtype=dtype)


@pytest.mark.parametrize(
    "data", [torch.zeros(64), torch.zeros(64, dtype=torch.int8), torch.zeros(8, 8, dtype=torch.uint8), b"0" * 64, None]
)
def test_bytes_are_one_line_of_uint8(data: object) -> None:
    refused(PayloadError, "data", "1-D uint8", "data.view(torch.uint8).flatten()", data=data)


@pytest.mark.parametrize("codec", ["int4", None, 4], ids=repr)
def test_a_codec_is_a_codec(codec: object) -> None:
    refused(PayloadError, "codec", codec=codec)


@pytest.mark.parametrize("thing", [None, b"bytes", torch.zeros(64, dtype=torch.uint8)], ids=lambda t: type(t).__name__)
def test_only_a_payload_is_decoded(thing: object) -> None:
    with pytest.raises(PayloadError) as caught:
        nc.decode(thing)  # type: ignore[arg-type]
    assert "payload: expected a Payload from encode()" in str(caught.value)
    assert type(thing).__name__ in str(caught.value)


def test_a_dtype_beside_an_out_of_another_is_refused_and_out_not_written() -> None:
    out = torch.full((100,), 7.0)
    with pytest.raises(DtypeError, match=r"dtype=torch.float16: out is torch.float32. Drop dtype="):
        nc.decode(nc.encode(mixed(100), "int4"), out=out, dtype=torch.float16)
    assert bool((out == 7.0).all())


def test_decode_to_a_dtype_that_is_not_float_is_refused() -> None:
    with pytest.raises(DtypeError, match="dtype: codecs give float32"):
        nc.decode(nc.encode(mixed(100), "int4"), dtype=torch.int32)


def test_any_bytes_of_the_right_length_decode_to_something(codec: Codec) -> None:
    # Hostile bytes may give any numbers, but no crash, and the same numbers twice.
    data = torch.randint(0, 256, (codec.row_bytes(200),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for filled in (data, torch.full_like(data, 255), torch.zeros_like(data)):
        payload = Payload(filled, codec, torch.Size((200,)), torch.float32)
        assert same_bits(nc.decode(payload), nc.decode(payload))
        codec.decode_sum_encode(filled.view(1, -1), 200, 1)
