"""Finds groups and contiguous datasets in an HDF5 file: the small part of the format that a shard uses, nothing else.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html (superblock 0, version 1 object headers and
B-trees, symbol-table groups, contiguous layout: what the library writes with `libver="earliest"`). The library itself
is not given files to read that may come from elsewhere: its parser, in C, has a history of crashes on malformed ones,
whereas whatever lies in a file, the worst that happens here is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from cache.formats.extents import ShardFile, TensorExtent

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NOWHERE = (1 << 64) - 1
MAX_HEAP_BYTES = 1 << 26  # names of the groups: 72 bytes an entry
MAX_HEADER_BYTES = 1 << 16
_DATASPACE, _DATATYPE, _LAYOUT, _CONTINUATION, _SYMBOL_TABLE = 0x01, 0x03, 0x08, 0x10, 0x11
# Without any effect here: padding, both fill values, attributes, modification time.
_IGNORED = {0x00, 0x04, 0x05, 0x0C, 0x12}
# Anything else is refused, above all links (0x06), external files (0x07) and filters (0x0B).
_DATATYPES = {
    bytes.fromhex("10000000 02000000 0000 1000"): torch.bfloat16,  # unsigned 16 bits, little-endian
    bytes.fromhex("10000000 01000000 0000 0800"): torch.float8_e4m3fn,  # unsigned 8 bits
    bytes.fromhex("10080000 01000000 0000 0800"): torch.int8,
    bytes.fromhex("11200f00 02000000 0000 1000 0a05 000a 0f000000"): torch.float16,
    bytes.fromhex("11201f00 04000000 0000 2000 1708 0017 7f000000"): torch.float32,
    bytes.fromhex("10080000 08000000 0000 4000"): torch.int64,
}


def root_group(file: ShardFile) -> int:
    """The address of the root group's object header.

    Raises:
        ValueError: it is not an HDF5 file of this kind.
    """
    block = file.bytes_at(0, 96, "the superblock")
    if block[:8] != SIGNATURE or block[8:13] != bytes(5) or block[13:16] != b"\x08\x08\0":
        raise ValueError("is not an HDF5 file of version 0 with addresses of 8 bytes")
    base, _, end, driver = struct.unpack_from("<4Q", block, 24)
    if base != 0 or driver != NOWHERE or end != file.size:
        raise ValueError(f"is not a whole HDF5 file: it states {end} bytes and has {file.size}")
    return int.from_bytes(block[64:72], "little")


def members(file: ShardFile, header: int) -> dict[str, int]:
    """Name -> address of the object header, of everything in a group.

    Raises:
        ValueError: it is not a group, or holds soft or external links.
    """
    messages = dict(_messages(file, header))
    if _SYMBOL_TABLE not in messages:
        raise ValueError(f"the object at byte {header} is not a group")
    tree, heap = _unpack("<2Q", messages[_SYMBOL_TABLE], 0)
    names = _heap(file, heap)
    found: dict[str, int] = {}
    for node in _symbol_nodes(file, tree):
        for name_at, address, cache_type in _symbols(file, node):
            end = names.find(b"\0", name_at)
            name = names[name_at:end].decode("latin-1")
            if end < 0 or name in found or cache_type not in (0, 1):  # 2 is a soft link
                raise ValueError(f"the group at byte {header} holds a link, or a name twice")
            found[name] = address
    return found


def dataset(file: ShardFile, header: int) -> TensorExtent:
    """Where the data of a contiguous, unfiltered dataset lie; uint16 stands for bfloat16.

    Raises:
        ValueError: it is not such a dataset, or its data are not in the file.
    """
    messages = dict(_messages(file, header))
    if not messages.keys() >= {_DATASPACE, _DATATYPE, _LAYOUT}:
        raise ValueError(f"the object at byte {header} is not a dataset")
    stated = messages[_DATATYPE].rstrip(b"\0")
    dtypes = [dtype for form, dtype in _DATATYPES.items() if form.rstrip(b"\0") == stated]
    (version, rank, flags) = _unpack("<3B", messages[_DATASPACE], 0)
    if version != 1 or rank > 3 or flags not in (0, 1) or not dtypes:
        raise ValueError(f"the dataset at byte {header} has an unknown shape or type")
    shape = _unpack(f"<{rank}Q", messages[_DATASPACE], 8)
    version, layout, address, size = _unpack("<2B2Q", messages[_LAYOUT], 0)
    extent = TensorExtent(0 if address == NOWHERE else address, dtypes[0], shape)
    if (version, layout) != (3, 1) or size != extent.num_bytes or (address == NOWHERE and size):
        raise ValueError(f"the dataset at byte {header} is not contiguous, or of another size than its shape")
    file.require(extent.offset, size, f"the dataset at byte {header}")
    return extent


def _messages(file: ShardFile, header: int) -> Iterator[tuple[int, bytes]]:
    """Type and body of the messages of an object header. One of a type, but for those that are ignored."""
    version, _, _, _, size = _unpack("<2BH2I", file.bytes_at(header, 16, "an object header"), 0)
    if version != 1:
        raise ValueError(f"there is no object header of version 1 at byte {header}")
    blocks: list[tuple[int, ...]] = [(header + 16, size)]
    total, seen = 0, set()
    while blocks:
        start, size = blocks.pop()
        total += size
        if total > MAX_HEADER_BYTES or size == 0:
            raise ValueError(f"the object header at byte {header} is larger than any of a shard")
        block, place = file.bytes_at(start, size, "an object header"), 0
        while place < size:
            kind, length, flags = _unpack("<2HB", block, place)
            body = block[place + 8 : place + 8 + length]
            place += 8 + length
            if len(body) != length or flags & 2 or (kind in seen and kind not in _IGNORED | {_CONTINUATION}):
                raise ValueError(f"the object header at byte {header} is damaged, or shares parts with another")
            seen.add(kind)
            if kind == _CONTINUATION:
                blocks.append(_unpack("<2Q", body, 0))
            elif kind in {_DATASPACE, _DATATYPE, _LAYOUT, _SYMBOL_TABLE}:
                yield kind, body
            elif kind not in _IGNORED:
                raise ValueError(f"the object header at byte {header} has a message {kind:#x}, which no shard has")


def _heap(file: ShardFile, address: int) -> bytes:
    block = file.bytes_at(address, 32, "a group's names")
    size, _, data = _unpack("<3Q", block, 8)
    if block[:8] != b"HEAP\0\0\0\0" or size > MAX_HEAP_BYTES:
        raise ValueError(f"there are no names at byte {address}")
    return file.bytes_at(data, size, "a group's names")


def _symbol_nodes(file: ShardFile, tree: int) -> Iterator[int]:
    """Addresses of the leaves of a group's B-tree; each node once, so that a tree in a circle comes to an end."""
    waiting, seen = [tree], {tree}
    while waiting:
        address = waiting.pop()
        head = file.bytes_at(address, 24, "a B-tree")
        level, used = _unpack("<BH", head, 5)
        if head[:5] != b"TREE\0":
            raise ValueError(f"there is no B-tree of a group at byte {address}")
        body = file.bytes_at(address + 24, 16 * used, "a B-tree")
        children = [int.from_bytes(body[16 * n + 8 : 16 * n + 16], "little") for n in range(used)]
        if len(set(children)) != used or seen.intersection(children):
            raise ValueError(f"the B-tree at byte {address} runs in a circle")
        seen.update(children)
        if level:
            waiting.extend(children)
        else:
            yield from children


def _symbols(file: ShardFile, address: int) -> Iterator[tuple[int, int, int]]:
    """Name's place in the heap, object header's address and cache type of each symbol of a leaf."""
    head = file.bytes_at(address, 8, "a symbol table")
    if head[:5] != b"SNOD\1":
        raise ValueError(f"there is no symbol table at byte {address}")
    count = int.from_bytes(head[6:8], "little")
    yield from struct.iter_unpack("<2QI20x", file.bytes_at(address + 8, 40 * count, "a symbol table"))


def _unpack(form: str, content: bytes, place: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, content, place)
    except struct.error as error:
        raise ValueError(f"a structure ends early: {error}") from error
