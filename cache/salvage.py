"""Takes up whole entries from the unfinished shards of a caching run that was killed.

They are added to a writer like any other entry. The shard may be that of another run which is alive: what its journal
names is not changed any more, so reading it is safe. Nothing of another writer's is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from cache.batches import Todo
from cache.errors import StoppedError
from cache.features import SCALE_DTYPE, SCALES, StoredFeatures, stored_features
from cache.formats.base import bytes_of, checksum
from cache.formats.extents import ShardFile, TensorExtent
from cache.journal import JournalEntry, find_journals, read_journal, shards_of
from cache.manifest import Manifest
from cache.progress import Progress
from cache.split_images import Grid
from cache.writer import CacheWriter


def take_up(
    todo: Sequence[Todo],
    writer: CacheWriter,
    manifest: Manifest,
    num_tokens: Callable[[Grid], int],
    progress: Progress,
    should_stop: Callable[[], bool],
) -> list[Todo]:
    """Add to `writer` what unfinished shards in its folder hold of `todo`; returns what is left to encode.

    What is not whole in them, or not as manifest and image say, is left.

    Args:
        num_tokens: N of a grid.
        should_stop: asked after each image.

    Raises:
        ResourceError: the disk is full; see CacheWriter.
        StoppedError: `should_stop` said so; leaving the writer's block commits what was taken up.
    """
    grids = {image.key: image.image_grid_thw for image, _ in todo}
    found = _noted(writer.folder, grids)
    if not found:
        return list(todo)
    taken = set[str]()
    progress.start("taking up images of an interrupted run", len(found), "image")
    for key, places in found.items():
        grid = grids[key]
        features = _first_whole(places, grid, _tensors_of(manifest, num_tokens(grid)))
        if features is not None:
            writer.add(key, features)
            taken.add(key)
        progress.advance()
        if should_stop():
            raise StoppedError("stopped; everything encoded so far is kept", do="run the same command to go on")
    progress.finish()
    return [item for item in todo if item[0].key not in taken]


def _noted(folder: Path, grids: dict[str, Grid]) -> dict[str, list[tuple[Path, JournalEntry]]]:
    """Where journals say that entries of these keys and grids stand."""
    found = defaultdict[str, list[tuple[Path, JournalEntry]]](list)
    for journal in find_journals(folder) if grids else []:
        for noted in read_journal(journal):
            key, grid = noted.entry.key, noted.entry.image_grid_thw
            if grids.get(key) == grid:
                found[key].append((journal, noted))
    return found


def _tensors_of(manifest: Manifest, tokens: int) -> dict[str, TensorExtent]:
    """The tensors that an entry must have, by name, each as if it lay at byte 0."""
    width, levels, dtype = manifest.hidden_size, manifest.num_deepstack_levels, manifest.stored_dtype
    tensors = {
        "image_embeds": TensorExtent(0, dtype, (tokens, width)),
        "deepstack_features": TensorExtent(0, dtype, (levels, tokens, width)),
        "image_grid_thw": TensorExtent(0, torch.int64, (3,)),
    }
    if manifest.storage_dtype != "same":
        tensors[SCALES] = TensorExtent(0, SCALE_DTYPE, (1 + levels, tokens))
    return tensors


def _first_whole(
    places: list[tuple[Path, JournalEntry]], grid: Grid, tensors: dict[str, TensorExtent]
) -> StoredFeatures | None:
    for journal, noted in places:
        for shard in shards_of(journal):
            try:
                features = _read(shard, noted, tensors)
            except (OSError, ValueError):
                continue
            if checksum(features) == noted.entry.checksum and tuple(features.image_grid_thw.tolist()) == grid:
                return features
    return None


def _read(shard: Path, noted: JournalEntry, tensors: dict[str, TensorExtent]) -> StoredFeatures:
    """An entry as it stands in a file.

    Raises:
        ValueError, OSError: it does not, or other tensors than `tensors` are noted.
    """
    if sorted([*noted.offsets, *noted.late]) != sorted(tensors):
        raise ValueError(f"tensors {', '.join([*noted.offsets, *noted.late])} instead of {', '.join(tensors)}")
    with closing(ShardFile(shard)) as file:
        return stored_features({name: _read_tensor(file, noted, name, extent) for name, extent in tensors.items()})


def _read_tensor(file: ShardFile, noted: JournalEntry, name: str, extent: TensorExtent) -> torch.Tensor:
    late, offset = noted.late.get(name), noted.offsets.get(name, 0)
    if late is None:
        file.require(offset, extent.num_bytes, f"tensor {name}")  # before memory is taken for it
    elif len(late) != extent.num_bytes:
        raise ValueError(f"tensor {name} has {len(late)} bytes instead of {extent.num_bytes}")
    tensor = torch.empty(extent.shape, dtype=extent.dtype)
    if late is None:
        file.fill(bytes_of(tensor), offset)
    else:
        bytes_of(tensor)[:] = late
    return tensor
