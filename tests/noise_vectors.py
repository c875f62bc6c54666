"""Words of the noise, pinned: every engine must draw these."""

from paceline.sampling.noise import COIN, DRAFT, RESIDUAL, SAMPLE

ONES = 0xFFFFFFFF
# Random123, tests/kat_vectors, "philox4x32 10": counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Ours: seed, stream, position, purpose, attempt -> words of the tokens 0..5 (frozen; torch and C++ must agree).
FROZEN = [
    ((0x0, 0, 0, SAMPLE, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8, 0xF8E4CCA4, 0x5CB200DB)),
    ((0x1, 0, 17, SAMPLE, 0), (0x0B9088D6, 0x3F9CD956, 0xADF29A9E, 0xF40F46B5, 0x00F873CA, 0xFDE524FF)),
    ((0x123456789ABCDEF, 2, 4096, DRAFT, 1), (0xFF486491, 0x68962F63, 0x6E2ADD0E, 0xE00904CE, 0x08A0B6E1, 0x9A32B715)),
    (
        (0xFFFFFFFFFFFFFFFF, 0, 131071, COIN, 7),
        (0x62F0DEF9, 0x0025635B, 0x3146D8B9, 0xA4185290, 0x6E0E05D9, 0x8D97C618),
    ),
    ((0x2A, 127, 5, RESIDUAL, 1048576), (0x9FD37373, 0x4C50C8E8, 0x380D3345, 0x66161F04, 0x9CAC5653, 0xD1219948)),
]
