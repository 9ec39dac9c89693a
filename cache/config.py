"""Settings of the model, the data and the cache. The docstring of a field is its entry in docs/configuration.md."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

Dtype = Literal["bfloat16", "float16", "float32"]
StorageDtype = Literal["same", "float8_e4m3", "int8"]
DataFormat = Literal["flat", "qwen", "sharegpt", "messages", "stages"]
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# os.path.expanduser leaves the home of an unknown user as it stands; Path.expanduser raises.
UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]  # noqa: PTH111
# An address stays text: as a path it would lose one of its two slashes.
Location = Annotated[
    Path | str,
    AfterValidator(lambda place: place if SCHEME.match(str(place)) else Path(os.path.expanduser(place))),  # noqa: PTH111
]


class Section(BaseModel):
    """Base of every part of the configuration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelConfig(Section):
    """Which checkpoint is trained. A plain string stands for `name_or_path`."""

    name_or_path: str
    """A folder in the Hugging Face layout, or a hub id such as `Qwen/Qwen3-VL-8B-Instruct`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"name_or_path": value} if isinstance(value, str) else value

    @field_validator("name_or_path")
    @classmethod
    def _home(cls, value: str) -> str:
        return os.path.expanduser(value)  # noqa: PTH111


class SplitConfig(Section):
    """Where one split lies. A plain string stands for `path`."""

    path: str
    """A `.jsonl`, `.json` or `.parquet` file, a folder of Parquet files, or a hub dataset id."""
    hub_split: str | None = None
    """Which split to take of a hub dataset; the split's own name when left out."""
    image_root: UserPath | None = None
    """Overrides `data.image_root` for this split."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class DataConfig(Section):
    """The dataset. Paths are relative to the working directory."""

    splits: dict[str, SplitConfig]
    """Name of each split and where it lies, e.g. `{train: train.jsonl, val: val.jsonl}`."""
    image_root: UserPath | None = None
    """Image paths are relative to this folder and must not leave it. Default: the folder of the split's file."""
    format: DataFormat | Literal["auto"] = "auto"
    """How a row is read. `auto` looks at the keys of the rows; all rows of a split have one format."""
    stage_format: str = "{target}"
    """How a stage is written in the answer; `{target}` and `{name}` are replaced. Stages are joined by a newline."""
    max_length: int = Field(default=32768, gt=0)
    """Longest sample in tokens, image tokens included. A longer record is refused: samples are never cut."""
    on_bad_record: Literal["fail", "report"] = "fail"
    """`fail` stops at the first record that cannot be used; `report` leaves it out, counts it and
    lists it in `<output_dir>/<split>.rejected.jsonl`."""
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    """With `on_bad_record: report`, a larger share of bad records than this still fails the run."""

    @field_validator("stage_format")
    @classmethod
    def _has_target(cls, value: str) -> str:
        if "{target}" not in value:
            raise ValueError("must contain {target}")
        return value

    @field_validator("splits")
    @classmethod
    def _not_empty(cls, value: dict[str, SplitConfig]) -> dict[str, SplitConfig]:
        if not value:
            raise ValueError("names no split; give at least `train: PATH`")
        for name in value:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"split name {name!r} may hold letters, digits, - and _ only (it becomes a file name)")
        return value


class CacheConfig(Section):
    """The feature cache."""

    dir: Location | None = None
    """Folder of the cache; experiments that share it share the features. Default: `<output_dir>/features`. For training
    and evaluation also an address: `http://`, `https://`, or any other that fsspec has a file system for. Then entries
    are read by range requests, without a local copy."""
    stage_to: Path | None = None
    """A folder on a disk of the node, e.g. `$SLURM_TMPDIR/features`: `$NAME`, `${NAME}` and `~` are what they are where
    the job runs. Before training, the shards that the run's splits need are copied there and checked, and training
    reads the copies. What is there already is not copied again. Nothing is deleted there but what a copy that was
    killed has left half-written."""
    format: Literal["safetensors", "webdataset", "hdf5"] = "safetensors"
    """Format of the shards that are written; reading takes any. docs/cache-format.md describes them."""
    dtype: Dtype = "bfloat16"
    """Dtype in which the tower runs, also on the live path, and in which the language model gets its output."""
    storage_dtype: StorageDtype = "same"
    """How the tower's output is stored. `same`: exactly, in `dtype`. `float8_e4m3`, `int8`: in 8 bits with a scale for
    each token and level, half the bytes of bfloat16. They are not exact: docs/benchmarks/storage-dtypes.md has the
    errors, and `pipeline verify --against-live` measures them on your data. The live path is not quantised."""
    min_pixels: int | None = Field(default=None, gt=0)
    """Smaller images are enlarged to this many pixels. Default: the checkpoint's processor setting."""
    max_pixels: int | None = Field(default=None, gt=0)
    """Larger images are reduced to this many pixels. Default: the checkpoint's processor setting (full resolution)."""
    image_processor_backend: Literal["auto", "pil", "torchvision"] = "auto"
    """Which implementation of the image processor runs. They differ in the last bits, so it is part of the fingerprint.
    `auto`: torchvision where it is installed, else PIL; when reading, whichever made the cache."""
    image_processor_device: Literal["cpu", "cuda"] = "cpu"
    """Where images are resized and cut into patches, also on the live path. `cuda`: worker processes only decode, and
    the torchvision image processor does the rest on the tower's GPU. The last bits differ, so `cuda` is part of the
    fingerprint."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_4"] = "sdpa"
    """Attention of the vision tower, transformers' names; part of the fingerprint. `flash_attention_4` is for the fast
    tower on Hopper GPUs where `vision-once[flash]` is installed: less time where several images go together."""
    tower: Literal["stock", "fast"] = "stock"
    """`stock`: transformers' own tower; the features are those of the live path, bit for bit. `fast`: compiled, for
    GPUs: a quarter less time an image, and last bits that differ as they do between batch sizes. Part of the
    fingerprint."""
    patches_per_batch: int | None = Field(default=None, gt=0)
    """Images of one shape go through the tower together, up to this many patches. Default: image by image, so that an
    entry does not depend on what else was to do. Part of the fingerprint."""
    shard_size: int = Field(default=1 << 30, gt=0)
    """A shard is closed once it holds this many bytes; a safetensors shard also with some thousand images. A request to
    stop costs nothing; a kill costs the images on their way to a shard's file: two or three batches of the tower, and
    one image or up to 64 MiB of features."""
    num_workers: int = Field(default=2, ge=0)
    """Processes that decode and resize images, for each GPU. One gives 10 to 30 images of a megapixel a second."""
    max_image_pixels: int = Field(default=200_000_000, gt=0)
    """An image that decodes to more pixels is refused before memory is taken (decompression bombs)."""
    device: str = "auto"
    """Where the tower runs: `auto` (cuda if there is one), `cpu`, `cuda`, `cuda:1`."""
    verify_checksums: bool = True
    """Compare each entry with its checksum when it is read."""

    @model_validator(mode="after")
    def _pixels_in_order(self) -> CacheConfig:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is larger than max_pixels {self.max_pixels}")
        return self

    @model_validator(mode="after")
    def _attention_fits_the_tower(self) -> CacheConfig:
        wanted = self.attn_implementation
        if self.tower == "fast" and wanted not in {"sdpa", "flash_attention_4"}:
            raise ValueError(f"tower: fast attends by sdpa or flash_attention_4; attn_implementation is {wanted}")
        if wanted == "flash_attention_4" and (self.tower != "fast" or self.dtype == "float32"):
            raise ValueError("attn_implementation: flash_attention_4 needs tower: fast and a dtype of 16 bits")
        return self
