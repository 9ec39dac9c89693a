"""Splits of every kind, image paths that are refused, and what happens to bad records."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image as PILImage

from cache.config import DataConfig
from cache.dataset import Rejection, SplitRecords, read_split
from cache.errors import ConfigError, DataError, ReadError
from cache.records import Embedded, Image, ImageRef, Text

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def read(path: Path | str, split: str = "train", hub_split: str | None = None, **settings: Any) -> SplitRecords:
    return read_split(DataConfig(splits={split: {"path": str(path), "hub_split": hub_split}}, **settings), split)


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def flat(image: object = "a.png", **fields: object) -> dict[str, Any]:
    return {"image": image, "question": "What?", "answer": "That."} | fields


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    PILImage.new("RGB", (8, 6), colour).save(buffer, "PNG")
    return buffer.getvalue()


def refusal(path: Path | str, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, **settings)
    assert caught.value.do
    return caught.value


@pytest.mark.parametrize(
    ("name", "count", "images"),
    [
        ("train.jsonl", 37, 37),
        ("val.jsonl", 5, 5),
        ("qwen_finetune.json", 3, 3),
        ("sharegpt.json", 5, 6),
        ("messages.jsonl", 3, 3),
        ("stages.jsonl", 2, 2),
    ],
)
def test_samples(name: str, count: int, images: int) -> None:
    result = read(DATA / name)
    assert (len(result.records), result.total, result.rejected) == (count, count, ())
    refs = [ref for record in result.records for ref in record.images]
    assert len(refs) == images
    for ref in refs:
        assert PILImage.open(io.BytesIO(ref.read())).size > (1, 1)


def test_record_of_a_jsonl_line() -> None:
    record = read(DATA / "train.jsonl").records[5]
    assert record.record_id == "q0005"
    assert record.source == f"{DATA / 'train.jsonl'}:6"
    assert record.images == (ImageRef("images/chart2code_input.png", (DATA / "images/chart2code_input.png").resolve()),)


def test_ids_and_sources_where_rows_have_none(tmp_path: Path) -> None:
    assert [record.record_id for record in read(DATA / "qwen_finetune.json").records] == [
        f"qwen_finetune.json[{index}]" for index in range(3)
    ]
    assert [record.record_id for record in read(DATA / "stages.jsonl").records] == ["stages.jsonl:1", "stages.jsonl:2"]
    repeated = read(write_rows(tmp_path / "a.jsonl", flat(id="x"), flat(id="x")))
    assert [record.record_id for record in repeated.records] == ["x", "x"]


def test_byte_order_mark_blank_lines_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = json.dumps(flat(answer="Ünd"), ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n   \n" + row)
    result = read(path)
    assert [record.source for record in result.records] == [f"{path}:1", f"{path}:4"]
    assert result.records[0].turns[1].content == (Text("Ünd"),)
    assert result.total == 2


def test_json_with_a_byte_order_mark_and_rows_under_data(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"data": [flat(), flat()]}).encode())
    assert [record.source for record in read(path).records] == [f"{path}[0]", f"{path}[1]"]


def test_format_and_stage_format_of_the_configuration(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"question": "Q", "answer": "x", "stages": [{"name": "n", "target": "t"}]})
    assert read(path, stage_format="{name}: {target}").records[0].turns[1].content == (Text("n: t", 1.0, "n"),)
    assert read(path, format="flat").records[0].turns[1].content == (Text("x"),)


def test_all_rows_of_a_split_have_the_format_of_the_first(tmp_path: Path) -> None:
    turns = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    error = refusal(write_rows(tmp_path / "a.jsonl", flat(), turns))
    assert error.what == "the row has no field 'question'; it has: conversations"
    assert error.where == f"{tmp_path / 'a.jsonl'}:2"


# Paths


@pytest.mark.parametrize("name", ["a.png", "./a.png", "sub/../a.png", "{root}/a.png", "{root}/sub/../a.png"])
def test_paths_inside_the_root_are_normalised(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    row = flat(name.replace("{root}", str(root)))
    ref = read(write_rows(tmp_path / "a.jsonl", row), image_root=root).records[0].images[0]
    assert ref == ImageRef("a.png", root.resolve() / "a.png")


def test_links_inside_the_root_keep_their_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "link").symlink_to("deep/er")
    (root / "deep" / "a.png").write_bytes(b"x")
    (root / "b.png").symlink_to("deep/a.png")
    names = ["link/c.png", "b.png", "link/../a.png"]
    refs = read(write_rows(tmp_path / "a.jsonl", *map(flat, names)), image_root=root).records
    found = [(ref.images[0].path, ref.images[0].file) for ref in refs]
    real = root.resolve()
    assert found == [
        ("link/c.png", real / "deep/er/c.png"),
        ("b.png", real / "deep/a.png"),
        ("deep/a.png", real / "deep/a.png"),
    ]


def test_a_root_that_is_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    rows = [flat("a.png"), flat(str(tmp_path / "root" / "a.png")), flat(str(tmp_path / "real" / "a.png"))]
    records = read(write_rows(tmp_path / "a.jsonl", *rows), image_root=tmp_path / "root").records
    expected = ImageRef("a.png", (tmp_path / "real" / "a.png").resolve())
    assert [record.images[0] for record in records] == [expected] * 3


def test_image_root_of_the_split_comes_before_that_of_the_dataset(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", flat())
    splits = {"train": {"path": str(path), "image_root": tmp_path / "own"}, "val": str(path)}
    data = DataConfig(splits=splits, image_root=tmp_path / "all")
    files = [read_split(data, split).records[0].images[0].file for split in ("train", "val")]
    assert files == [tmp_path.resolve() / "own/a.png", tmp_path.resolve() / "all/a.png"]


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "sub/../../secret.png", "{tmp}/secret.png", "file-link.png", "link/secret.png", "chain.png"],
)
def test_paths_that_leave_the_root_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "file-link.png").symlink_to(tmp_path / "secret.png")
    (root / "chain.png").symlink_to("file-link.png")
    (root / "link").symlink_to(tmp_path)
    name = name.replace("{tmp}", str(tmp_path))
    error = refusal(write_rows(tmp_path / "a.jsonl", flat(), flat(name)), image_root=root)
    assert error.where == f"{tmp_path / 'a.jsonl'}:2"
    secret = tmp_path.resolve() / "secret.png"
    assert error.what == f"image {name!r} leaves the image root {root.resolve()}: it leads to {secret}"


def test_a_link_to_the_root_itself_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "itself").symlink_to("/")
    row = flat(str(tmp_path / "itself"))
    assert "leaves the image root /" in refusal(write_rows(tmp_path / "a.jsonl", row), image_root=Path("/")).what


def test_a_folder_with_the_roots_name_as_its_beginning_is_outside(tmp_path: Path) -> None:
    (tmp_path / "root-of-another").mkdir()
    row = flat("../root-of-another/a.png")
    assert "leaves the image root" in refusal(write_rows(tmp_path / "a.jsonl", row), image_root=tmp_path / "root").what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://host/a.png", "image 'https://host/a.png' is a URL"),
        ("HTTP://host/a.png", "image 'HTTP://host/a.png' is a URL"),
        ("file:///a.png", "image 'file:///a.png' is a URL"),
        ("data:image/png;base64,aGk=", "image 'data:image/png;base64,aGk=' is a URL"),
        ("images/", "image 'images/' names a folder"),
        (".", "image '.' names a folder"),
        ("images/..", "image 'images/..' names a folder"),
        ("a\0.png", "image 'a\\x00.png' has a null character"),
        ("a\ud83d.png", "field 'image' has half a surrogate pair at character 1"),
    ],
)
def test_names_that_are_no_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    error = refusal(write_rows(tmp_path / "a.jsonl", flat(name)))
    assert message in error.what
    assert error.where == f"{tmp_path / 'a.jsonl'}:1"


def test_each_folder_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    realpath = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path, **kw: seen.append(str(path)) or realpath(path, **kw))
    path = write_rows(tmp_path / "a.jsonl", *(flat(f"deep/{index % 5}.png") for index in range(20)))
    records = read(path).records
    assert seen.count(str(tmp_path / "deep")) == 1
    assert records[0].images[0] is records[5].images[0]


# Image bytes


@pytest.mark.parametrize("missing", [True, False])
def test_reading_a_missing_or_empty_file(tmp_path: Path, missing: bool) -> None:
    if not missing:
        (tmp_path / "a.png").touch()
    ref = read(write_rows(tmp_path / "a.jsonl", flat())).records[0].images[0]
    with pytest.raises(DataError, match="does not exist" if missing else r"empty \(0 bytes\)") as caught:
        ref.read()
    assert caught.value.where == str(tmp_path.resolve() / "a.png")


def test_reading_a_folder_or_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for file in (tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(DataError, match="not a regular file"):
            ImageRef("a.png", file).read()


def test_reading_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.png").write_bytes(b"x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ReadError, match="cannot be read: Permission denied"):
        ImageRef("a.png", tmp_path / "a.png").read()


# Parquet, saved folders, hub


def embedded_dataset() -> datasets.Dataset:
    rows = [
        {"images": [{"bytes": png("red"), "path": None}], "question": "A?", "answer": "a", "id": 4},
        {"images": None, "question": "B?", "answer": "b", "id": 5},
        {
            "images": [{"bytes": png("blue"), "path": "x.png"}, {"bytes": png("green"), "path": None}],
            "question": "<image>C<image>?",
            "answer": "c",
            "id": None,
        },
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "id": datasets.Value("int64"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


def saved(kind: str, folder: Path) -> tuple[Path, str]:
    data = embedded_dataset()
    if kind == "file":
        data.to_parquet(folder / "d.parquet")
        return folder / "d.parquet", "d.parquet"
    if kind == "folder":
        (folder / "d").mkdir()
        data.select([0]).to_parquet(folder / "d" / "train-00000-of-00002.parquet")
        data.select([1, 2]).to_parquet(folder / "d" / "train-00001-of-00002.parquet")
        data.select([1]).to_parquet(folder / "d" / "test-00000-of-00001.parquet")
    elif kind == "save_to_disk":
        data.save_to_disk(folder / "d")
    else:
        datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(folder / "d")
    return folder / "d", "d"


@pytest.mark.parametrize("kind", ["file", "folder", "save_to_disk", "save_to_disk of splits"])
def test_embedded_images(tmp_path: Path, kind: str) -> None:
    path, name = saved(kind, tmp_path)
    records = read(path).records
    assert [record.record_id for record in records] == ["4", "5", f"{name}[2]"]
    assert [record.source for record in records] == [f"{path}[{index}]" for index in range(3)]
    assert [[ref.path for ref in record.images] for record in records] == [
        [f"{name}#0/0"],
        [],
        [f"{name}#2/0", f"{name}#2/1"],
    ]
    assert records[2].turns[0].content == (Image(0), Text("C"), Image(1), Text("?"))
    refs = [ref for record in records for ref in record.images]
    assert [ref.read() for ref in refs] == [png("red"), png("blue"), png("green")]
    assert [ref.read() for ref in pickle.loads(pickle.dumps(refs))] == [png("red"), png("blue"), png("green")]


def test_hub_split_names_the_split_of_a_folder(tmp_path: Path) -> None:
    for kind in ("folder", "save_to_disk of splits"):
        (tmp_path / kind).mkdir()
        path, _ = saved(kind, tmp_path / kind)
        assert [record.record_id for record in read(path, hub_split="test").records] == ["5"]
        error = refusal(path, split="val")
        assert error.what in ("no split 'val'; there are: test, train", "no split 'val'; there are: train, test")


def test_parquet_rows_with_plain_bytes_paths_and_images_in_messages(tmp_path: Path) -> None:
    text = {"type": "text", "text": "What?", "image": None}
    image = {"type": "image", "text": None, "image": {"bytes": png("red"), "path": None}}
    named = {"type": "image", "text": None, "image": {"bytes": None, "path": "sub/a.png"}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": [text, image, named]},
                {"role": "assistant", "content": [text | {"text": "That."}]},
            ]
        }
    ] * 2
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "m.parquet")
    record = read(tmp_path / "m.parquet").records[1]
    assert record.turns[0].content == (Text("What?"), Image(0), Image(1))
    assert record.images[0].path == "m.parquet#1/0"
    assert record.images[0].read() == png("red")
    assert record.images[1] == ImageRef("sub/a.png", tmp_path.resolve() / "sub/a.png")

    datasets.Dataset.from_list([flat(png("blue")), flat(None)]).to_parquet(tmp_path / "b.parquet")
    records = read(tmp_path / "b.parquet").records
    assert records[0].images[0].read() == png("blue")
    assert records[1].images == ()


def test_parquet_row_whose_other_image_column_is_null(tmp_path: Path) -> None:
    rows = [flat({"bytes": png("red")}, images=None), flat(None, images=[{"bytes": png("blue")}])]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    records = read(tmp_path / "d.parquet").records
    assert [[ref.read() for ref in record.images] for record in records] == [[png("red")], [png("blue")]]


def test_stages_in_parquet_whose_weight_is_null(tmp_path: Path) -> None:
    stages = [{"name": "a", "target": "x", "weight": None}, {"name": "b", "target": "y", "weight": 2.0}]
    datasets.Dataset.from_list([{"question": "Q", "stages": stages}]).to_parquet(tmp_path / "s.parquet")
    content = read(tmp_path / "s.parquet").records[0].turns[1].content
    assert content == (Text("x\n", 1.0, "a"), Text("y", 2.0, "b"))


def test_empty_embedded_image(tmp_path: Path) -> None:
    datasets.Dataset.from_list([flat({"bytes": b"", "path": None})]).to_parquet(tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"^e\.parquet#0/0: the image is empty"):
        read(tmp_path / "e.parquet").records[0].images[0].read()


def test_reading_records_leaves_image_bytes_on_disk(tmp_path: Path) -> None:
    size, count = 1 << 20, 24
    rows = ({"images": [{"bytes": bytes([index]) * size}], "question": "Q", "answer": "a"} for index in range(count))
    data = datasets.Dataset.from_list(list(rows))
    data.save_to_disk(tmp_path / "d")
    del data
    read(DATA / "val.jsonl")
    import pyarrow

    before = pyarrow.total_allocated_bytes()
    pool = pyarrow.default_memory_pool()
    tracemalloc.start()
    try:
        records = read(tmp_path / "d").records
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(records) == count
    assert peak < size * count // 4
    assert pool.bytes_allocated() - before < size
    handle = records[-1].images[0].data
    assert isinstance(handle, Embedded)
    assert len(pickle.dumps(handle)) < 20_000
    assert handle.read() == bytes([count - 1]) * size


@pytest.mark.parametrize("kind", ["parquet", "shards that no batch ends with"])
def test_more_rows_than_one_batch(tmp_path: Path, kind: str) -> None:
    def image(row: int, copy: int) -> dict[str, Any]:
        # Every other image is a path, so that one taken for its neighbour shows.
        return {"bytes": b"%d" % (10 * row + copy)} if copy else {"path": f"{row}.png"}

    rows = [
        {"images": [image(row, copy) for copy in range(row % 3)], "question": "Q", "answer": "a"} for row in range(2110)
    ]
    rows[705]["images"] = None
    data = datasets.Dataset.from_list(rows)
    path = tmp_path / ("d.parquet" if kind == "parquet" else "d")
    if kind == "parquet":
        data.to_parquet(path, batch_size=300)
    else:
        data.save_to_disk(path, num_shards=3)
    records = read(path).records
    assert len(records) == 2110
    for row in (0, 1, 299, 302, 701, 705, 998, 1001, 1400, 2099):
        count = row % 3 if row != 705 else 0
        refs = records[row].images
        assert [ref.path for ref in refs] == [f"{row}.png", f"{path.name}#{row}/1"][:count]
        assert [ref.read() for ref in refs[1:]] == [b"%d" % (10 * row + 1)][: max(count - 1, 0)]


def test_hub_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, **settings: Any) -> datasets.Dataset:
        asked.append((name, settings))
        return embedded_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    records = read("org/name", hub_split="validation").records
    assert asked == [("org/name", {"split": "validation"})]
    assert records[2].images[1].path == "org/name#2/1"
    assert records[2].images[1].read() == png("green")
    assert records[2].record_id == "org/name[2]"
    read("org/name", split="val")
    assert asked[1] == ("org/name", {"split": "val"})


def test_hub_dataset_with_paths_needs_an_image_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: datasets.Dataset.from_list([flat("x/a.png")]))
    monkeypatch.chdir(tmp_path)
    error = refusal("org/name")
    assert error.where == "org/name[0]"
    assert "image 'x/a.png' is a path" in error.what
    assert "data.image_root" in str(error.do)
    assert read("org/name", image_root=tmp_path).records[0].images[0].file == tmp_path.resolve() / "x/a.png"


def test_hub_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(name: str, **_: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    error = refusal("org/name")
    assert error.where == "org/name"
    assert "Dataset 'org/name' doesn't exist on the Hub" in error.what


# Files that cannot be read


def test_unknown_split_lists_the_splits() -> None:
    data = DataConfig(splits={"train": "a.jsonl", "val": "b.jsonl"})
    with pytest.raises(ConfigError, match=r"unknown split 'test'\n.*use one of: train, val"):
        read_split(data, "test")


@pytest.mark.parametrize("name", ["none.jsonl", "sub/none.parquet", "a/b/c", "none"])
def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(name)
    assert error.where == name
    assert error.what == f"there is no such file or folder (looked for {tmp_path / name})"


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "'.csv'"), ("rows", "'without a suffix'")])
def test_other_kinds_of_files(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("x")
    assert kind in refusal(tmp_path / name).what


def test_folder_without_parquet(tmp_path: Path) -> None:
    assert refusal(tmp_path).what == "the folder holds no .parquet file"


def test_parquet_in_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "data [v1]*"
    folder.mkdir()
    path, _ = saved("file", folder)
    assert len(read(path).records) == 3


def test_parquet_without_rows(tmp_path: Path) -> None:
    embedded_dataset().select([]).to_parquet(tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet").where == str(tmp_path / "a.parquet")


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    error = refusal(tmp_path / "a.parquet")
    assert error.where == str(tmp_path / "a.parquet")
    assert "cannot be read" in error.what
    assert "Parquet" in error.what


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b'{"question": "a",}', ":2:18", "malformed JSON"),
        (b'{"question": "a', ":2:14", "malformed JSON: Unterminated string"),
        (b'"\xff\xfe"', ":2:2", "byte 2 is not UTF-8"),
        (b"[" * 100_000, ":2", "JSON that cannot be decoded"),
        (b"[1]", ":2", "the row is list [1], not an object"),
        (b"null", ":2", "the row is null, not an object"),
    ],
)
def test_malformed_line(tmp_path: Path, content: bytes, place: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    row = json.dumps(flat()).encode()
    path.write_bytes(row + b"\n" + content + b"\n" + row + b"\n")
    error = refusal(path)
    assert error.where == f"{path}{place}"
    assert message in error.what
    result = read(path, on_bad_record="report", max_bad_share=0.5)
    assert [record.source for record in result.records] == [f"{path}:1", f"{path}:3"]
    assert result.rejected == (Rejection(f"{path}{place}", error.what),)


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ('[\n{"question": }]', ":2:14", "malformed JSON"),
        ('{"question": "a"}\n{"question": "b"}', ":2:1", "malformed JSON: Extra data"),
        ('{"rows": []}', "", 'not a list of rows or {"data": [...]}'),
        ("3", "", "the file is int 3"),
    ],
)
def test_malformed_json_file(tmp_path: Path, content: str, place: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    for policy in ("fail", "report"):
        error = refusal(path, on_bad_record=policy)
        assert error.where == f"{path}{place}"
        assert message in error.what


# Bad records


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n"), ("a.json", "[]"), ("b.json", '{"data": []}')])
def test_empty_dataset(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    error = refusal(tmp_path / name)
    assert error.what == "the dataset has no usable record"
    assert error.where == str(tmp_path / name)


def test_dataset_of_bad_records_only(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", flat(answer=""))
    error = refusal(path, on_bad_record="report", max_bad_share=1.0)
    assert error.what.startswith("the dataset has no usable record\n")
    assert f"{path}:1: field 'answer' is empty" in error.what


def test_first_bad_record_fails(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", flat(), flat(answer=""), flat(answer=None))
    error = refusal(path)
    assert error.where == f"{path}:2"
    assert error.what == "field 'answer' is empty ('')"


def test_bad_records_are_reported_up_to_the_share(tmp_path: Path) -> None:
    bad = [flat(answer=""), flat("../x.png"), {"x": 1}, flat(question=5)]
    path = write_rows(tmp_path / "a.jsonl", *bad, *[flat(id=str(index)) for index in range(6)])
    result = read(path, on_bad_record="report", max_bad_share=0.4)
    assert [record.record_id for record in result.records] == [str(index) for index in range(6)]
    assert (result.total, result.path) == (10, str(path))
    assert [rejection.source for rejection in result.rejected] == [f"{path}:{line}" for line in range(1, 5)]
    reasons = ["field 'answer' is empty", "leaves the image root", "the row has no field", "field 'question' is int 5"]
    for rejection, reason in zip(result.rejected, reasons, strict=True):
        assert reason in rejection.reason

    error = refusal(path, on_bad_record="report", max_bad_share=0.39)
    assert "4 of 10 records cannot be used: 40.00%, more than the 39.00% of data.max_bad_share" in error.what
    assert [f"{path}:{line}: " in error.what for line in range(1, 5)] == [True, True, True, False]


def test_parquet_row_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list([flat(), flat(answer=None)]).to_parquet(tmp_path / "d.parquet")
    error = refusal(tmp_path / "d.parquet")
    assert error.where == f"{tmp_path / 'd.parquet'}[1]"
    assert error.what == "the row: field 'answer' is null"
