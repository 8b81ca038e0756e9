"""Test that `combine_checksums` computes the checksum of all the data from the checksums of its chunks."""

import random
import zlib

import pytest

from slipstream.checkpoint.crc import combine_checksums


@pytest.mark.parametrize("first", [0, 1, 999, 1000])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 37, 1000, 2**16])
def test_combined_checksum_matches_zlib(first, count, length):
    content = random.Random(first).randbytes(first + count * length)
    chunks = [
        content[:first],
        *(content[first + i * length : first + (i + 1) * length] for i in range(count)),
    ]
    assert combine_checksums([zlib.crc32(chunk) for chunk in chunks], length) == zlib.crc32(content)
