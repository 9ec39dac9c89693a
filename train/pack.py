"""Samples -> one row without padding, shared prefixes standing once. Who sees whom is one vector, `visible_until`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from train.pack_mask import BLOCK_SIZE, BlockLayout, PackMask, dense_mask
from train.prefix_tree import Node, Symbols, build_forest
from train.sample import Sample, widen, widths
from train.sample import Sequence as Widened


@dataclass(frozen=True, slots=True)
class Pack:
    """Some samples in one row.

    Attributes:
        input_ids: (1, S) int64.
        position_ids: (4, 1, S) int64: running index, then M-RoPE t, h, w.
        visible_until: (S,) int64; the token at row position k is seen by the positions q with
            k <= q < visible_until[k].
        target_positions: (T,) int64, row positions whose logits are needed; one stands twice where branches begin
            with different targets.
        target_ids: (T,) int64, the token that each of them must predict.
        target_weights: (T,) float32.
        image_positions: (M,) int64, row positions of the images' placeholders.
        images: for each image of the row, in order, its place in the step's list of distinct images.
        is_causal: the whole row is one chain, so a plain causal mask does.
        blocks: the block mask's layout; present where rows are attended by blocks.
        stage_weights: (G, T) float32, the part of target_weights that comes from each stage of staged answers; present
            where the data has stages.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    visible_until: torch.Tensor
    target_positions: torch.Tensor
    target_ids: torch.Tensor
    target_weights: torch.Tensor
    image_positions: torch.Tensor
    images: tuple[int, ...]
    is_causal: bool
    blocks: BlockLayout | None = None
    stage_weights: torch.Tensor | None = None

    def map_tensors(self, how: str, *args: object, **kwargs: object) -> Pack:
        """A copy in which the method `how` was called on every tensor (`pin_memory`, `to`)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = getattr(value, how)(*args, **kwargs)
            elif isinstance(value, BlockLayout):
                values[name] = value.map_tensors(how, *args, **kwargs)
        return Pack(**values)

    def attention_mask(self) -> torch.Tensor | PackMask | None:
        """What the model takes: a block mask where there is a layout, none for one chain, else a dense mask."""
        if self.blocks is not None:
            return self.blocks.block_mask(self.visible_until)
        return None if self.is_causal else dense_mask(self.visible_until)


def build_pack(
    samples: Sequence[Sample],
    symbols: Sequence[Symbols],
    run: Sequence[int],
    image_places: dict[str, int],
    *,
    image_token_id: int,
    merge_size: int,
    share: bool,
    blocks: bool = False,
    stages: Sequence[str] = (),
) -> Pack:
    """Lay a run of samples out in one row.

    A node's tokens stand once, its branches behind it, each going on with the positions of the prefix and seeing the
    prefix and itself only.

    Args:
        samples, symbols: the step's, see prefix_tree.symbols_of.
        run: indices of those in this row, neighbours sharing prefixes.
        image_places: image key -> place in the step's list of distinct images.
        blocks: pad the row to whole blocks and lay out its block mask.
        stages: names of the answer stages to tell apart.
    """
    row = _Row(samples, image_places, image_token_id, merge_size, stages)
    forest = build_forest(symbols, run, share=share)
    for node in forest:
        row.add(node, before=-1)
    if blocks:
        row.pad_to_blocks()
    return row.finish(is_causal=len(forest) == 1 and _is_chain(forest[0]), blocks=blocks)


class _Row:
    """A row under construction."""

    def __init__(
        self,
        samples: Sequence[Sample],
        image_places: dict[str, int],
        image_token_id: int,
        merge_size: int,
        stages: Sequence[str],
    ) -> None:
        self._samples, self._places = samples, image_places
        self._image_token_id, self._merge_size = image_token_id, merge_size
        self._length = 0
        self._ids: list[npt.NDArray[np.int64]] = []
        self._positions: list[npt.NDArray[np.int64]] = []
        self._until: list[npt.NDArray[np.int64]] = []
        self._target_positions: list[npt.NDArray[np.int64]] = []
        self._target_ids: list[npt.NDArray[np.int64]] = []
        self._target_weights: list[npt.NDArray[np.float32]] = []
        self._images: list[int] = []
        self._stages = {name: number for number, name in enumerate(stages)}
        self._stage_weights: list[npt.NDArray[np.float32]] = []

    def add(self, node: Node, *, before: int) -> None:
        """Append a node and its subtree; `before` is the row position of the token in front of it, -1 for none."""
        sample = self._samples[node.samples[0]]
        wide, first, last = self._stretch(sample, node)
        start, length = self._length, last - first
        self._ids.append(wide.input_ids[first:last])
        self._positions.append(wide.position_ids[:, first:last])
        self._add_targets(node, wide, first, last, before)
        skipped = int((sample.text.input_ids[: node.start] == self._image_token_id).sum())
        inside = int((sample.text.input_ids[node.start : node.stop] == self._image_token_id).sum())
        self._images += [self._places[image.key] for image in sample.images[skipped : skipped + inside]]
        place = len(self._until)
        self._until.append(np.empty(0, dtype=np.int64))
        self._length += length
        for child in node.children:
            self.add(child, before=start + length - 1)
        self._until[place] = np.full(length, self._length)

    def _stretch(self, sample: Sample, node: Node) -> tuple[Widened, int, int]:
        wide = widen(sample, image_token_id=self._image_token_id, merge_size=self._merge_size)
        ends = np.cumsum(widths(sample, image_token_id=self._image_token_id, merge_size=self._merge_size))
        return wide, int(ends[node.start - 1]) if node.start else 0, int(ends[node.stop - 1])

    def _add_targets(self, node: Node, wide: Widened, first: int, last: int, before: int) -> None:
        # Every sample that goes through the node has its say in the weight; placeholders weigh nothing, so weights of
        # the compact text can be added before they are widened.
        compact = sum(
            (self._samples[i].text.weights[node.start : node.stop] for i in node.samples[1:]),
            self._samples[node.samples[0]].text.weights[node.start : node.stop],
        )
        sample = self._samples[node.samples[0]]
        repeats = widths(sample, image_token_id=self._image_token_id, merge_size=self._merge_size)
        weights = np.repeat(compact, repeats[node.start : node.stop])
        places = np.flatnonzero(weights)
        if before < 0:
            places = places[places > 0]  # nothing stands in front of a row's first token, so nothing predicts it
        positions = self._length + places - 1
        positions[places == 0] = before
        self._target_positions.append(positions)
        self._target_ids.append(wide.input_ids[first:last][places])
        self._target_weights.append(weights[places].astype(np.float32))
        if self._stages:
            staged = np.repeat(self._weights_by_stage(node), repeats[node.start : node.stop], axis=1)
            self._stage_weights.append(staged[:, places])

    def _weights_by_stage(self, node: Node) -> npt.NDArray[np.float32]:
        """(G, S) the weights of a node's compact tokens, those of each stage by themselves."""
        found = np.zeros((len(self._stages), node.stop - node.start), dtype=np.float32)
        for text in (self._samples[i].text for i in node.samples):
            for span in text.stages:
                first, last = max(span.start, node.start), min(span.stop, node.stop)
                if first < last:
                    own = found[self._stages[span.name], first - node.start : last - node.start]
                    own += text.weights[first:last]
        return found

    def pad_to_blocks(self) -> None:
        """Fill up the last block with tokens that see and are seen by nobody else.

        A row takes two blocks at least: for the compiler a dimension of size one is another program.
        """
        missing = max(-self._length % BLOCK_SIZE, 2 * BLOCK_SIZE - self._length)
        if missing:
            filler = 0 if self._image_token_id else 1
            self._ids.append(np.full(missing, filler))
            self._positions.append(np.zeros((3, missing), dtype=np.int64))
            self._until.append(np.arange(self._length, self._length + missing) + 1)
            self._length += missing

    def finish(self, *, is_causal: bool, blocks: bool) -> Pack:
        """The row as tensors."""
        until = np.concatenate(self._until)
        running = np.arange(self._length)[None]
        ids = np.concatenate(self._ids)
        return Pack(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(np.concatenate([running, np.concatenate(self._positions, axis=1)]))[:, None],
            visible_until=torch.from_numpy(until),
            target_positions=torch.from_numpy(np.concatenate(self._target_positions)),
            target_ids=torch.from_numpy(np.concatenate(self._target_ids)),
            target_weights=torch.from_numpy(np.concatenate(self._target_weights)),
            image_positions=torch.from_numpy(np.flatnonzero(ids == self._image_token_id)),
            images=tuple(self._images),
            is_causal=is_causal,
            blocks=BlockLayout.of(until) if blocks else None,
            stage_weights=torch.from_numpy(np.concatenate(self._stage_weights, axis=1)) if self._stages else None,
        )


def _is_chain(node: Node) -> bool:
    return not node.children or (len(node.children) == 1 and _is_chain(node.children[0]))
