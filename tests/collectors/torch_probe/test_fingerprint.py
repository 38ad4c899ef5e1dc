import pytest
import torch

from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.complex64]


def tensor_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    """`count` elements of random bits."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype)


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_every_single_flipped_bit_changes_the_fingerprint(dtype, count):
    tensor = tensor_of(dtype, count)
    before = fingerprint([tensor])
    for byte in range(tensor.numel() * tensor.element_size()):
        for bit in range(8):
            flip(tensor, byte, bit)
            assert fingerprint([tensor]) != before, f"byte {byte} bit {bit}"
            flip(tensor, byte, bit)
    assert fingerprint([tensor]) == before


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[:, 1:4],
        lambda base: base[::2],
        lambda base: base.view(-1)[1:],
        lambda base: base.view(-1)[3:8],
        lambda base: base.view(2, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda base: base[1, 2],
        lambda base: base[:1, :].expand(3, 12),
    ],
    ids=["transposed", "columns", "every second row", "odd offset", "middle", "channels last", "scalar", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flipped_bit_is_seen_in_strided_and_misaligned_tensors(view, dtype):
    base = tensor_of(dtype, 48).view(4, 12)
    tensor = view(base)
    before = fingerprint([tensor])
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    words = tensor.view(bits)
    for place in {(0,) * tensor.dim(), tuple(size - 1 for size in tensor.shape)}:
        words[place] ^= 1
        assert fingerprint([tensor]) != before
        words[place] ^= 1
    assert fingerprint([tensor]) == before


def test_equal_replicas_have_equal_fingerprints_and_the_order_of_tensors_does_not_matter():
    tensors = [tensor_of(dtype, count) for dtype in DTYPES for count in (3, 8)]
    copies = [tensor.clone() for tensor in reversed(tensors)]
    assert fingerprint(tensors) == fingerprint(copies)


def test_nan_payloads_and_the_sign_of_zero_count():
    zero = torch.zeros(4)
    assert fingerprint([zero]) != fingerprint([-zero])
    nan = torch.full((4,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[2] ^= 1
    assert fingerprint([nan]) != fingerprint([other])


def test_the_fingerprint_is_a_signed_64_bit_number_even_when_the_sum_wraps():
    big = torch.full((5,), torch.iinfo(torch.int64).max)
    assert fingerprint([big]) == (5 * (2**63 - 1) + 2**63) % 2**64 - 2**63


def test_no_tensors_and_empty_tensors_have_nothing_to_sum():
    assert bit_sum([]) is None
    assert fingerprint([torch.empty(0), torch.empty(0, 3)]) == 0


def test_parameters_are_read_without_recording_a_graph():
    total = bit_sum([torch.nn.Parameter(torch.ones(3))])
    assert total is not None
    assert not total.requires_grad
