"""What a run of the cache stage did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.dataset import Rejection


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of the cache stage did.

    Attributes:
        distinct_images, image_tokens: of the whole split.
        recovered_images: taken up from shards that a killed run had not finished (cache.salvage); not encoded again.
        encoded_images, written_bytes, seconds: of this run; the seconds are those of encoding and writing.
        waited: of these seconds, how many one stage waited for another: `images` from the decoding processes, the
            `tower`, the `disk`. They overlap; what is waited for most sets the rate.
        rejected: the split's, as far as this part and those that ended before it know.
    """

    split: str
    folder: Path
    num_records: int
    distinct_images: int
    image_tokens: int
    recovered_images: int
    encoded_images: int
    written_bytes: int
    seconds: float
    waited: dict[str, float]
    rejected: list[Rejection]

    @property
    def images_per_second(self) -> float:
        """Rate of this run."""
        return self.encoded_images / self.seconds if self.seconds > 0 else 0.0

    def figures(self) -> dict[str, Any]:
        """Everything but the rejected records, for a JSON file."""
        return {
            "split": self.split,
            "cache": str(self.folder),
            "num_records": self.num_records,
            "num_rejected": len(self.rejected),
            "distinct_images": self.distinct_images,
            "image_tokens": self.image_tokens,
            "recovered_images": self.recovered_images,
            "encoded_images": self.encoded_images,
            "written_bytes": self.written_bytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 3),
            "waited": {name: round(seconds, 3) for name, seconds in self.waited.items()},
        }
