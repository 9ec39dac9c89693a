"""Rows of every accepted format, and every mistake in them that has a message of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import DataError
from cache.records import Image, Text, Turn
from cache.row_formats import RowParts, detect_format, parse_row

DATA = Path(__file__).parents[1] / "data"
WHERE = "train.jsonl:7"


def rows_of(name: str) -> list[dict]:
    text = (DATA / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


def parse(row: object, data_format: str | None = None, **settings: str) -> RowParts:
    return parse_row(row, data_format or detect_format(row, WHERE), WHERE, **settings)


def paths(parts: RowParts) -> list[str | None]:
    return [image.path for image in parts.images]


def written(turn: Turn) -> str:
    return "".join(part.text if isinstance(part, Text) else "<image>" for part in turn.content)


def chat(*texts: tuple[str, object], images: list | None = None) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in texts], "images": images or []}


def flat(**fields: object) -> dict:
    return {"image": "a.png", "question": "What?", "answer": "That."} | fields


def staged(*stages: object, **fields: object) -> dict:
    return {"image": "a.png", "question": "What?", "stages": list(stages)} | fields


@pytest.mark.parametrize(
    ("name", "data_format", "count"),
    [
        ("train.jsonl", "flat", 37),
        ("val.jsonl", "flat", 5),
        ("qwen_finetune.json", "qwen", 3),
        ("sharegpt.json", "sharegpt", 5),
        ("messages.jsonl", "messages", 3),
        ("stages.jsonl", "stages", 2),
    ],
)
def test_samples_are_detected_and_read(name: str, data_format: str, count: int) -> None:
    rows = rows_of(name)
    assert len(rows) == count
    assert {detect_format(row, WHERE) for row in rows} == {data_format}
    for row in rows:
        parts = parse(row)
        places = [part.index for turn in parts.turns for part in turn.content if isinstance(part, Image)]
        assert places == list(range(len(parts.images)))
        assert parts.turns[-1].role == "assistant"


def test_flat_row_puts_the_image_in_front() -> None:
    parts = parse(rows_of("train.jsonl")[0])
    assert parts.turns == (
        Turn("user", (Image(0), Text("What is the colour of the car behind the black one?"))),
        Turn("assistant", (Text("Yellow."),)),
    )
    assert paths(parts) == ["images/autonomous_driving.jpg"]
    assert parts.record_id == "q0000"


def test_qwen_row_keeps_the_newline_before_the_image() -> None:
    parts = parse(rows_of("qwen_finetune.json")[0])
    assert parts.turns == (
        Turn("user", (Text("Is the value of Favorable 38 in 2015?\n"), Image(0))),
        Turn("assistant", (Text("Yes"),)),
    )
    assert parts.record_id is None


def test_sharegpt_row_names_one_image_twice() -> None:
    parts = parse(rows_of("sharegpt.json")[3])
    assert paths(parts) == ["images/lounge.jpg", "images/manipulation.jpg", "images/lounge.jpg"]
    assert parts.turns[0].content == (Image(0), Image(1), Text("Which of the two pictures shows a robot?"))
    assert parts.turns[2].content == (Image(2), Text("And what is this?"))


def test_sharegpt_row_without_images_and_with_a_system_turn() -> None:
    parts = parse(rows_of("sharegpt.json")[4])
    assert parts.images == ()
    assert parts.turns[0] == Turn("system", (Text("Answer in one word."),))


def test_sharegpt_row_with_conversations() -> None:
    row = {
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "That."}],
        "images": ["a.png"],
    }
    assert detect_format(row, WHERE) == "sharegpt"
    parts = parse(row)
    assert [turn.role for turn in parts.turns] == ["user", "assistant"]
    assert paths(parts) == ["a.png"]


def test_messages_row() -> None:
    parts = parse(rows_of("messages.jsonl")[0])
    assert parts.turns == (
        Turn("user", (Image(0), Text("What animal is drawn on the sign?"))),
        Turn("assistant", (Text("A donkey."),)),
    )


def test_messages_part_with_its_own_path_stands_between_listed_images() -> None:
    content = [
        {"type": "image"},
        {"type": "text", "text": "or", "image": None},
        {"type": "image", "path": "own.png", "image": {"bytes": None, "path": None}},
        {"type": "image", "image": "other.png"},
        {"type": "image", "image": None, "text": None},
    ]
    parts = parse(chat(("user", content), ("assistant", "That."), images=["a.png", "b.png"]))
    assert paths(parts) == ["a.png", "own.png", "other.png", "b.png"]
    assert parts.images[1].location == ("messages", 0, "content", 2, "path")
    assert parts.turns[0].content == (Image(0), Text("or"), Image(1), Image(2), Image(3))


def test_stages_become_one_turn_of_weighted_pieces() -> None:
    row = staged(
        {"name": "observe", "target": "A {name}."},
        {"name": "reason", "target": "So.", "weight": 0},
        {"name": "answer", "target": True, "weight": 2.5},
    )
    parts = parse(row, stage_format="[{name}] {target} {x}")
    assert parts.turns[1] == Turn(
        "assistant",
        (
            Text("[observe] A {name}. {x}\n", 1.0, "observe"),
            Text("[reason] So. {x}\n", 0.0, "reason"),
            Text("[answer] True {x}", 2.5, "answer"),
        ),
    )


@pytest.mark.parametrize("data_format", ["flat", "stages", "qwen", "sharegpt"])
def test_system_prompt_of_the_row_is_the_first_turn(data_format: str) -> None:
    row = {
        "flat": flat(),
        "stages": staged({"name": "answer", "target": "x"}),
        "qwen": {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}],
        },
        "sharegpt": chat(("user", "What?"), ("assistant", "x")),
    }[data_format] | {"system": "Be brief."}
    assert parse(row, data_format).turns[0] == Turn("system", (Text("Be brief."),))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"image": ["a.png", "b.png"]}, ["a.png", "b.png"]),
        ({"image": None, "images": ["a.png", "a.png"]}, ["a.png", "a.png"]),
        ({"image": None}, []),
        ({"image": {"bytes": None, "path": "a.png"}}, ["a.png"]),
        ({"image": {"bytes": b"", "path": "a.png"}}, [None]),
        ({"image": b""}, [None]),
    ],
)
def test_images_of_a_flat_row(fields: dict, expected: list) -> None:
    parts = parse(flat(**fields))
    assert paths(parts) == expected
    assert parts.turns[0].content == (*map(Image, range(len(expected))), Text("What?"))


@pytest.mark.parametrize(("answer", "text"), [(3, "3"), (0.5, "0.5"), (False, "False"), (" x\n", " x\n")])
def test_answers_that_are_no_strings(answer: object, text: str) -> None:
    assert parse(flat(answer=answer)).turns[1].content == (Text(text),)


@pytest.mark.parametrize(("value", "expected"), [(7, "7"), ("x", "x"), ("", None), (None, None)])
def test_record_id(value: object, expected: str | None) -> None:
    assert parse(flat(id=value)).record_id == expected


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5)


@given(texts, st.sampled_from(["flat", "qwen", "sharegpt", "messages", "stages"]))
def test_text_around_images_is_kept_to_the_letter(pieces: list[str], data_format: str) -> None:
    question = "Look: " + "<image>".join(pieces)
    images = [f"{index}.png" for index in range(question.count("<image>"))]
    row = {
        "flat": {"images": images, "question": question, "answer": "x"},
        "stages": {"images": images, "question": question, "stages": [{"name": "a", "target": "x"}]},
        "qwen": {
            "image": images,
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "x"}],
        },
        "sharegpt": chat(("user", question), ("assistant", "x"), images=images),
        "messages": chat(("user", [{"type": "text", "text": question}]), ("assistant", "x"), images=images),
    }[data_format]
    parts = parse(row, data_format)
    assert written(parts.turns[0]) == question
    assert all(part.text for part in parts.turns[0].content if isinstance(part, Text))
    assert paths(parts) == images


NO_TURN = "no assistant turn to learn from; roles: "
MISTAKES = [
    (3, "flat", "the row is int 3, not an object"),
    (flat(question=["a"]), None, "field 'question' is list ['a'], not a string"),
    (flat(question=None), None, "the row: field 'question' is null"),
    ({"image": "a.png", "answer": "x"}, "flat", "the row has no field 'question'; it has: image, answer"),
    ({"image": "a.png", "question": "x"}, "flat", "the row has no field 'answer'; it has: image, question"),
    (flat(answer=None), None, "the row: field 'answer' is null"),
    (flat(answer=" \n"), None, "field 'answer' is empty (' \\n')"),
    (flat(answer=float("nan")), None, "field 'answer' is nan"),
    (flat(answer=["Yes"]), None, "field 'answer' is list ['Yes'], not a string"),
    (flat(answer="an <image>"), None, "field 'answer' has an <image> in a turn of the assistant"),
    (flat(question="\ud83d?"), None, "field 'question' has half a surrogate pair at character 0: '\\ud83d?'"),
    (flat(system="an <image>"), None, "field 'system' has an <image> in a turn of the system"),
    (flat(system=4), None, "field 'system' is int 4, not a string"),
    (flat(question="<image> <image>"), None, "the text has 2 <image>, the row names 1 images"),
    (flat(image=None, question="<image>"), None, "the text has 1 <image>, the row names 0 images"),
    (flat(image=None, question=" "), None, "turn 0, of the user, is empty"),
    (flat(image=True), None, "field 'image' is bool True, not the path of an image"),
    (flat(image=""), None, "field 'image' is str '', not the path of an image"),
    (flat(image=["a.png", None]), None, "image[1] is null, not the path of an image"),
    (flat(image={"bytes": "aGk="}), None, "field 'image' is dict {'bytes': 'aGk='}, not the path of an image"),
    (flat(images=["b.png"]), None, "the row has both 'image' and 'images'"),
    (flat(id=[1]), None, "field 'id' is list [1], not a string or a number"),
    (flat(video="a.mp4"), None, "field 'video' names a video"),
    (staged(), None, "field 'stages' is empty"),
    (staged(stages={"name": "a"}), None, "field 'stages' is dict {'name': 'a'}, not a list"),
    (staged("x"), None, "stages[0] is str 'x', not an object"),
    (staged({"target": "x"}), None, "stages[0] has no field 'name'; it has: target"),
    (staged({"name": "a"}), None, "stages[0] has no field 'target'; it has: name"),
    (staged({"name": "a", "target": ""}), None, "stages[0].target is empty ('')"),
    (staged({"name": "a", "target": "<image>"}), None, "stages[0].target has an <image> in a turn of the assistant"),
    (staged({"name": "a", "target": "x", "weight": -1}), None, "stages[0].weight is -1"),
    (staged({"name": "a", "target": "x", "weight": float("nan")}), None, "stages[0].weight is nan"),
    (staged({"name": "a", "target": "x", "weight": float("inf")}), None, "stages[0].weight is inf"),
    (staged({"name": "a", "target": "x", "weight": 10**400}), None, "stages[0].weight is 1000"),
    (staged({"name": "a", "target": "x", "weight": True}), None, "stages[0].weight is bool True, not a number"),
    (staged({"name": "a", "target": "x", "weight": 0}), None, "every stage has the weight 0"),
    (chat(("user", "a")), None, NO_TURN + "user"),
    (chat(), None, NO_TURN + "none"),
    (chat(("user", "a"), ("assistant", "b"), ("user", "c")), None, "the last turn is a user turn"),
    (chat(("user", "a"), ("assistant", " \t")), None, "turn 1, of the assistant, is empty"),
    (chat(("user", "a"), ("assistant", [])), None, "turn 1, of the assistant, is empty"),
    (chat(("user", "a"), ("assistant", None)), None, "messages[1]: field 'content' is null"),
    (chat(("user", "a"), ("assistant", 5)), None, "messages[1].content is int 5, not a string"),
    (chat(("user", "a"), ("tool", "b")), None, "messages[1] has the unknown role 'tool'"),
    (chat(("user", "a"), ("system", "s"), ("assistant", "b")), None, "turn 1 is a system turn"),
    (chat(("system", "s"), ("assistant", "b")) | {"system": "t"}, None, "both a field 'system' and a system turn"),
    (chat(("user", "a"), ("assistant", "b<image>"), images=["a.png"]), None, "messages[1].content has an <image>"),
    (chat(("system", "<image>"), ("assistant", "b"), images=["a.png"]), None, "messages[0].content has an <image>"),
    (chat(("user", "a"), ("assistant", "b"), images=["a.png"]), None, "the text has 0 <image>, the row names 1 images"),
    (chat(("user", [{"type": "video"}]), ("gpt", "b")), None, "messages[0].content[0] has the unknown type 'video'"),
    (chat(("user", [{"text": "a"}])), None, "messages[0].content[0] has no field 'type'; it has: text"),
    (chat(("user", ["a"]), ("assistant", "b")), None, "messages[0].content[0] is str 'a', not an object"),
    (chat(("user", [{"type": "image", "image": 3}])), None, "messages[0].content[0].image is int 3"),
    (chat(("user", "a"), ("assistant", [{"type": "image"}])), None, "messages[1].content[0] has an <image> in a turn"),
    (chat(("user", [{"type": "image"}]), ("assistant", "b")), None, "the text has 1 <image>, the row names 0 images"),
    ({"messages": [{"content": "a"}]}, None, "messages[0] has no field 'role'; it has: content"),
    ({"messages": ["a"]}, None, "messages[0] is str 'a', not an object"),
    ({"messages": "a"}, None, "field 'messages' is str 'a', not a list"),
    (chat(("user", "a")), "qwen", "the row has no field 'conversations'; it has: messages, images"),
    ({"conversations": [{"from": "human"}]}, None, "conversations[0] has no field 'value'; it has: from"),
    ({"conversations": [{"from": "human", "value": []}]}, None, "conversations[0].value is list [], not a string"),
    ({"conversations": [{"from": ["x"], "value": "a"}]}, None, "conversations[0] has the unknown role ['x']"),
    ({"text": "a", "label": 1}, None, "the row's format is not recognised; it has the keys: text, label"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "data_format", "message"), MISTAKES)
def test_mistakes_are_named_with_place_and_value(row: object, data_format: str | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(row, data_format)
    assert message in caught.value.what
    assert caught.value.where == WHERE
    assert caught.value.do
