"""Many writers of one cache: the images are divided by their keys, so that no part need ask another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """One of `count` parts; `index` counts from 0, as the tasks of a job array do.

    Raises:
        ConfigError: there is no such part.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"there is no part {self.index} of {self.count}", do="parts are numbered 0 to --num-parts minus 1"
            )

    def has(self, key: str) -> bool:
        """Whether the image of this key belongs to this part."""
        return part_of(key, self.count) == self.index

    @property
    def of_several(self) -> bool:
        """Whether there are other parts."""
        return self.count > 1

    @property
    def name(self) -> str:
        """For file names."""
        return f"part-{self.index}-of-{self.count}"

    def options(self) -> str:
        """As it stands on the command line."""
        return f"--num-parts {self.count} --part {self.index}"


WHOLE = Part(0, 1)


def part_of(key: str, count: int) -> int:
    """The part that an image belongs to: decided by its content alone, whatever else a part sees of the dataset."""
    return int(key[:16], 16) % count


def commands_for(split: str, keys: Iterable[str], count: int) -> str:
    """The commands that make the entries of these keys, for a person; `count` 1 stands for a cache without parts."""
    command = f"pipeline cache --split {split}"
    if count == 1:
        return f"`{command}`"
    parts = sorted({part_of(key, count) for key in keys})
    return ", ".join(f"`{command} {Part(index, count).options()}`" for index in parts)
