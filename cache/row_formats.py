"""One row of a dataset in any accepted format -> turns and images. Pure: nothing is read from disk here.

Sources of the formats:
    flat, stages: this project (docs of `data.format`).
    qwen: the finetune format of QwenLM/Qwen3-VL, qwen-vl-finetune (`image`, `conversations` of `from` and `value`).
    sharegpt: `messages` of `role` and `content` (or `conversations`), with `<image>` in the strings, and `images`.
    messages: the content lists of Hugging Face chat templates, with `images` beside them or a path in each image part.

In every format `<image>` in a user's text is the place of an image, and the text around it is kept to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cache.config import DataFormat
from cache.errors import DataError
from cache.records import Image, Role, Text, Turn
from cache.row_fields import Row, as_answer, as_list, as_object, as_text, as_weight, key_list, malformed, require, show

IMAGE_PLACE = "<image>"
_ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"
}  # fmt: skip
_IMAGE_PART_KEYS = ("image", "path", "url")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a row names it.

    Attributes:
        path: the path as it stands in the row; None when the encoded bytes are in the row.
        location: keys and indices that lead from the row to the image.
    """

    path: str | None
    location: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class RowParts:
    """What a row says, before its image paths are resolved.

    Attributes:
        turns: as in `Record`; image parts count into `images`.
        images: in the order of their places.
        record_id: the row's own `id`, if it has one.
    """

    turns: tuple[Turn, ...]
    images: tuple[ImageSource, ...]
    record_id: str | None


# An image part that is None takes the next image of the row's list.
_DraftTurn = tuple[Role, list[Text | ImageSource | None]]
_Draft = list[_DraftTurn]


def detect_format(row: Row, where: str) -> DataFormat:
    """The format of a row, by its keys.

    Args:
        row: one row; keys whose value is null count as absent, as Parquet fills them in.
        where: file and line, for messages.

    Raises:
        DataError: the keys are those of no format.
    """
    if row.get("stages") is not None:
        return "stages"
    if row.get("messages") is not None:
        turns = row["messages"] if isinstance(row["messages"], list) else []
        has_parts = any(isinstance(turn, Mapping) and isinstance(turn.get("content"), list) for turn in turns)
        return "messages" if has_parts else "sharegpt"
    if row.get("conversations") is not None:
        return "sharegpt" if row.get("images") is not None else "qwen"
    if "question" in row and "answer" in row:
        return "flat"
    raise DataError(
        f"the row's format is not recognised; it has the keys: {key_list(row)}",
        where=where,
        do="give question and answer, question and stages, conversations, or messages; or set data.format",
    )


def parse_row(row: object, data_format: DataFormat, where: str, stage_format: str = "{target}") -> RowParts:
    """Reads one row.

    Args:
        row: the decoded row. Embedded images stand in it as `bytes`, or as a mapping with `bytes` and `path`.
        data_format: how it is read.
        where: file and line, for messages.
        stage_format: `DataConfig.stage_format`; how a stage is written in the answer.

    Raises:
        DataError: the row cannot be used. The message names the field and its value.
    """
    mapping = as_object(row, "the row", where)
    for key in ("video", "videos"):
        if mapping.get(key):
            raise DataError(f"field {key!r} names a video", where=where, do="leave rows with videos out: images only")
    if data_format == "flat":
        draft = _flat(mapping, where)
    elif data_format == "stages":
        draft = _stages(mapping, where, stage_format)
    else:
        draft = _conversation(mapping, data_format, where)
    if (system := mapping.get("system")) not in (None, ""):
        if any(role == "system" for role, _ in draft):
            raise DataError("the row has both a field 'system' and a system turn", where=where, do="keep one of them")
        draft.insert(0, ("system", _content(system, "system", (), "field 'system'", where)))
    _check_roles([role for role, _ in draft], where)
    turns, images = _bind(draft, _listed_images(mapping, where), data_format in ("flat", "stages"), where)
    _check_content(turns, where)
    return RowParts(turns, images, _record_id(mapping, where))


def _flat(row: Row, where: str) -> _Draft:
    question = require(row, "question", "the row", where)
    answer = as_answer(require(row, "answer", "the row", where), "field 'answer'", where)
    return [
        ("user", _content(question, "user", (), "field 'question'", where)),
        ("assistant", _split(answer, "assistant", "field 'answer'", where)),
    ]


def _stages(row: Row, where: str, stage_format: str) -> _Draft:
    question = require(row, "question", "the row", where)
    stages = as_list(require(row, "stages", "the row", where), "field 'stages'", where)
    pieces: list[Text | ImageSource | None] = []
    for index, value in enumerate(stages):
        owner = f"stages[{index}]"
        stage = as_object(value, owner, where)
        name = as_text(require(stage, "name", owner, where), f"{owner}.name", where)
        target = as_answer(require(stage, "target", owner, where), f"{owner}.target", where)
        _refuse_place(target, "assistant", f"{owner}.target", where)
        text = _format_stage(stage_format, name, target) + ("\n" if index + 1 < len(stages) else "")
        pieces.append(Text(text, as_weight(stage.get("weight"), f"{owner}.weight", where), name))
    if not pieces:
        raise DataError("field 'stages' is empty", where=where, do="give at least one stage")
    if not any(isinstance(piece, Text) and piece.weight for piece in pieces):
        raise DataError(
            "every stage has the weight 0, so nothing would be learned", where=where, do="give one stage a weight"
        )
    return [("user", _content(question, "user", (), "field 'question'", where)), ("assistant", pieces)]


def _format_stage(stage_format: str, name: str, target: str) -> str:
    # One pass, so that a target in which `{name}` stands is not replaced again.
    values = {"{name}": name, "{target}": target}
    return re.sub(r"\{(?:name|target)\}", lambda match: values[match.group()], stage_format)


def _conversation(row: Row, data_format: DataFormat, where: str) -> _Draft:
    named_so = data_format == "sharegpt" and row.get("messages") is None and row.get("conversations") is not None
    key = "conversations" if data_format == "qwen" or named_so else "messages"
    draft: _Draft = []
    for index, value in enumerate(as_list(require(row, key, "the row", where), f"field {key!r}", where)):
        owner = f"{key}[{index}]"
        turn = as_object(value, owner, where)
        role_key, text_key = _turn_keys(turn, key)
        name = require(turn, role_key, owner, where)
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise DataError(f"{owner} has the unknown role {show(name)}", where=where, do=f"use {', '.join(_ROLES)}")
        content = require(turn, text_key, owner, where)
        draft.append((role, _content(content, role, (key, index, text_key), f"{owner}.{text_key}", where)))
    return draft


def _turn_keys(turn: Row, key: str) -> tuple[str, str]:
    has_role = "role" in turn or ("from" not in turn and key == "messages")
    return ("role", "content") if has_role else ("from", "value")


def _content(
    value: object, role: Role, location: tuple[str | int, ...], what: str, where: str
) -> list[Text | ImageSource | None]:
    if not isinstance(value, list) or not location or location[-1] != "content":
        return _split(as_text(value, what, where), role, what, where)
    parts: list[Text | ImageSource | None] = []
    for index, item in enumerate(value):
        owner = f"{what}[{index}]"
        part = as_object(item, owner, where)
        kind = require(part, "type", owner, where)
        if kind == "text":
            parts += _split(as_text(require(part, "text", owner, where), f"{owner}.text", where), role, owner, where)
        elif kind == "image":
            _refuse_place(IMAGE_PLACE, role, owner, where)
            own = next((key for key in _IMAGE_PART_KEYS if _names_image(part.get(key))), None)
            parts.append(_image_source(part[own], (*location, index, own), f"{owner}.{own}", where) if own else None)
        else:
            raise DataError(f"{owner} has the unknown type {show(kind)}", where=where, do="use text or image parts")
    return parts


def _split(text: str, role: Role, what: str, where: str) -> list[Text | ImageSource | None]:
    _refuse_place(text, role, what, where)
    parts: list[Text | ImageSource | None] = []
    for index, piece in enumerate(text.split(IMAGE_PLACE)):
        if index:
            parts.append(None)
        if piece:
            parts.append(Text(piece))
    return parts


def _refuse_place(text: str, role: Role, what: str, where: str) -> None:
    if role != "user" and IMAGE_PLACE in text:
        raise DataError(
            f"{what} has an {IMAGE_PLACE} in a turn of the {role}", where=where, do="place images in user turns only"
        )


def _check_roles(roles: list[Role], where: str) -> None:
    if "assistant" not in roles:
        raise DataError(
            f"no assistant turn to learn from; roles: {', '.join(roles) or 'none'}", where=where, do="add an answer"
        )
    if roles[-1] != "assistant":
        raise DataError(f"the last turn is a {roles[-1]} turn", where=where, do="end with an assistant turn")
    if "system" in roles[1:]:
        # Chat templates that look for a system prompt in the first turn only drop a later one without a word.
        raise DataError(
            f"turn {roles.index('system', 1)} is a system turn", where=where, do="put the system turn first"
        )


def _check_content(turns: tuple[Turn, ...], where: str) -> None:
    for index, turn in enumerate(turns):
        if all(isinstance(part, Text) and not part.text.strip() for part in turn.content):
            raise DataError(
                f"turn {index}, of the {turn.role}, is empty", where=where, do="fill it, or leave the row out"
            )


def _bind(
    draft: _Draft, listed: list[ImageSource], may_go_in_front: bool, where: str
) -> tuple[tuple[Turn, ...], tuple[ImageSource, ...]]:
    places = sum(part is None for _, content in draft for part in content)
    if may_go_in_front and not places:
        first_user = next(content for role, content in draft if role == "user")
        first_user[:0] = [None] * len(listed)
    elif places != len(listed):
        raise DataError(
            f"the text has {places} {IMAGE_PLACE}, the row names {len(listed)} images",
            where=where,
            do=f"write {IMAGE_PLACE} once for each image",
        )
    pool, images, turns = iter(listed), list[ImageSource](), list[Turn]()
    for role, content in draft:
        bound: list[Text | Image] = []
        for part in content:
            if isinstance(part, Text):
                bound.append(part)
            else:
                bound.append(Image(len(images)))
                images.append(next(pool) if part is None else part)
        turns.append(Turn(role, tuple(bound)))
    return tuple(turns), tuple(images)


def _listed_images(row: Row, where: str) -> list[ImageSource]:
    key = "images" if row.get("image") is None else "image"
    value = row.get(key)
    if value is None:
        return []
    if key == "image" and row.get("images") is not None:
        raise DataError("the row has both 'image' and 'images'", where=where, do="keep one of them")
    if not isinstance(value, list):
        return [_image_source(value, (key,), f"field {key!r}", where)]
    return [_image_source(item, (key, index), f"{key}[{index}]", where) for index, item in enumerate(value)]


def _names_image(value: object) -> bool:
    # Parquet may fill a missing `{bytes, path}` in with two nulls.
    return any(value.get(key) is not None for key in ("bytes", "path")) if isinstance(value, Mapping) else bool(value)


def _image_source(value: object, location: tuple[str | int, ...], what: str, where: str) -> ImageSource:
    embedded = value.get("bytes") if isinstance(value, Mapping) else value
    if isinstance(embedded, bytes):
        return ImageSource(None, location)
    path = value.get("path") if isinstance(value, Mapping) and embedded is None else value
    if not isinstance(path, str) or not path:
        raise malformed(what, "the path of an image", value, where)
    return ImageSource(as_text(path, what, where), location)


def _record_id(row: Row, where: str) -> str | None:
    value = row.get("id")
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise malformed("field 'id'", "a string or a number", value, where)
    return str(value)
