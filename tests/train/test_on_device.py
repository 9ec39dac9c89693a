"""A step's features come to the device when a pack first needs them, and go after the last that does."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from itertools import chain

import pytest
import torch

from cache.features import QuantizedFeatures, StoredFeatures, VisionFeatures
from cache.quantize import dequantize
from train import on_device
from train.features import CachedImage, features_on
from train.on_device import Feeder
from train.pack import Pack
from train.step import Step

CPU = torch.device("cpu")
USES = [(0,), (0, 1), (1, 1), (), (2,), (0,), (3, 4)]  # the images of each pack
HELD = [{0}, {0, 1}, {0, 1}, {0}, {0, 2}, {0}, {3, 4}]
LEVELS, TOKENS, WIDTH = 3, 64, 256


def _image(seed: int, *, quantized: bool) -> StoredFeatures:
    dice = torch.Generator().manual_seed(seed)
    grid = torch.tensor((1, 16, 16))
    shape = (1 + LEVELS, TOKENS, WIDTH)
    if quantized:
        numbers = torch.randint(-127, 128, shape, generator=dice, dtype=torch.int8)
        return QuantizedFeatures(numbers[0], numbers[1:], grid, torch.rand(shape[:2], generator=dice))
    exact = torch.randn(shape, generator=dice).bfloat16()
    return VisionFeatures(exact[0], exact[1:], grid)


def _pack(images: tuple[int, ...]) -> Pack:
    row = torch.arange(8)
    return Pack(
        input_ids=row[None],
        position_ids=row.expand(4, 1, -1).contiguous(),
        visible_until=torch.full((8,), 8),
        target_positions=row[:1],
        target_ids=row[:1],
        target_weights=torch.ones(1),
        image_positions=row[:0],
        images=images,
        is_causal=True,
    )


def _step(*, quantized: bool) -> Step:
    images = tuple(CachedImage(_image(seed, quantized=quantized), torch.bfloat16) for seed in range(5))
    return Step(tuple(_pack(images) for images in USES), images, 1.0, len(USES), 0)


@pytest.mark.parametrize("quantized", [True, False])
def test_every_pack_has_its_features(quantized: bool) -> None:
    step = _step(quantized=quantized)
    wanted = features_on(CPU, step.images, None)
    held = []
    for (pack, features), made in zip(Feeder(CPU, None).packs(step), step.packs, strict=True):
        assert torch.equal(pack.input_ids, made.input_ids)
        assert pack.images == made.images
        held.append(set(features))
        for place, found in features.items():
            for name, tensor in found.tensors().items():
                assert torch.equal(tensor, wanted[place].tensors()[name])
    assert held == HELD


def test_what_no_later_pack_needs_is_freed_before_the_next_comes() -> None:
    """Dequantised features are tensors of their own, whose end can be watched."""
    seen: dict[int, weakref.ref[torch.Tensor]] = {}
    living = []
    for _, features in Feeder(CPU, None).packs(_step(quantized=True)):
        seen |= {place: weakref.ref(found.image_embeds) for place, found in features.items() if place not in seen}
        living.append({place for place, tensor in seen.items() if tensor() is not None})
    assert living == HELD


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams do: they are played, and the copies themselves are made on the CPU."""
    log: list[str] = []
    computing, beside = _Stream("computing", log), _Stream("beside", log)

    class Played(on_device._Copies):
        def __init__(self, device: torch.device) -> None:
            self._device, self._beside = device, beside  # type: ignore[assignment]

    monkeypatch.setattr(on_device, "_Copies", Played)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return log


READY, COPY = "computing waits for beside", "beside waits for computing"


@pytest.mark.parametrize("quantized", [True, False])
def test_one_stream_copies_ahead_of_the_one_that_computes(quantized: bool, streams: list[str]) -> None:
    step = _step(quantized=quantized)
    wanted = features_on(CPU, step.images, None)
    for number, (_, features) in enumerate(Feeder(CPU, None).packs(step)):
        streams.append(f"pack {number}")
        assert set(features) == HELD[number]
        assert all(torch.equal(found.image_embeds, wanted[place].image_embeds) for place, found in features.items())
        assert all(
            found.image_embeds is not step.images[place].features.image_embeds for place, found in features.items()
        )

    packs = [f"pack {number}" for number in range(len(USES))]
    assert streams == [COPY, *(word for pack in packs[:-1] for word in (READY, COPY, pack)), READY, packs[-1], READY]


@pytest.mark.parametrize("quantized", [True, False])
def test_what_the_following_step_needs_first_is_copied_beside_the_last_pack(
    quantized: bool, streams: list[str]
) -> None:
    feeder = Feeder(CPU, None)
    one, two, three = (_step(quantized=quantized) for _ in range(3))
    for step, following in ((one, two), (two, three), (three, None)):
        for number, (_, features) in enumerate(feeder.packs(step, following)):
            streams.append(f"pack {number}")
            wanted = features_on(CPU, step.images, None)
            assert set(features) == HELD[number]
            for place, found in features.items():
                assert torch.equal(found.deepstack_features, wanted[place].deepstack_features)
        streams.append("end")

    packs = [f"pack {number}" for number in range(len(USES))]
    known = [*(word for pack in packs for word in (READY, COPY, pack)), READY, "end"]
    last = [*(word for pack in packs[:-1] for word in (READY, COPY, pack)), READY, packs[-1], READY, "end"]
    assert streams == [COPY, *known, *known, *last]


def test_another_step_than_the_one_that_was_said_to_follow_has_its_own_features(streams: list[str]) -> None:
    feeder = Feeder(CPU, None)
    one, promised = _step(quantized=True), _step(quantized=True)
    other = replace(one, images=tuple(CachedImage(_image(50 + n, quantized=True), torch.bfloat16) for n in range(5)))
    list(feeder.packs(one, promised))
    wanted = features_on(CPU, other.images, None)
    for _, features in feeder.packs(other):
        assert all(torch.equal(found.image_embeds, wanted[place].image_embeds) for place, found in features.items())


def test_copies_are_awaited_where_a_pack_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their memory could be given to others while they are under way."""
    ended: list[bool] = []
    monkeypatch.setattr(on_device._Copies, "finish", lambda self: ended.append(True))
    packs = Feeder(CPU, None).packs(_step(quantized=True), _step(quantized=True))
    next(packs)
    ended.clear()
    packs.close()  # type: ignore[attr-defined]

    assert ended == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the computing need a GPU")
@pytest.mark.parametrize("quantized", [True, False])
def test_copies_beside_the_computing_are_whole_and_few(quantized: bool) -> None:
    """Many packs of two steps, each on an image of its own: those of two packs lie on the device, however far ahead the
    host is."""
    device = torch.device("cuda", torch.cuda.current_device())
    count = 40
    stored = [_image(seed, quantized=quantized) for seed in range(count)]
    images = tuple(CachedImage(one, torch.bfloat16).pin_memory() for one in stored)
    halves = [
        Step(tuple(_pack((place,)) for place in range(count // 2)), part, 1.0, count // 2, 0)
        for part in (images[: count // 2], images[count // 2 :])
    ]
    work = torch.randn(4096, 4096, device=device)
    sums = torch.zeros(count, device=device, dtype=torch.float64)
    torch.mm(work, work)  # its workspace is allocated at first use
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    feeder = Feeder(device, None)
    chained = chain(feeder.packs(halves[0], halves[1]), feeder.packs(halves[1]))
    for number, (_, features) in enumerate(chained):
        for _ in range(20):
            torch.mm(work, work, out=torch.empty_like(work))  # so that the host is far ahead
        found = features[number % (count // 2)]
        sums[number] = found.image_embeds.double().sum() + found.deepstack_features.double().sum()
    peak = torch.cuda.max_memory_allocated() - before

    exact = [dequantize(one, torch.bfloat16) if isinstance(one, QuantizedFeatures) else one for one in stored]
    wanted = [one.image_embeds.double().sum() + one.deepstack_features.double().sum() for one in exact]
    torch.testing.assert_close(sums.cpu(), torch.stack(wanted), rtol=1e-9, atol=1e-6)
    one_image = (1 + LEVELS) * TOKENS * WIDTH * 2
    assert peak < work.nbytes + 25 * one_image  # room for the sums in double precision; all of them would be 40
