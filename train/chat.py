"""The chat template -> token ids and loss weights of one record. Only assistant turns are targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.bad_records import LEAVE_OUT
from cache.config import ModelConfig
from cache.errors import ConfigError, DataError
from cache.records import Image, Record, Text, Turn

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The tokens [start, stop) of a record that answer one stage of it."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A record's tokens with one placeholder an image, before the placeholders are widened.

    Attributes:
        input_ids: (S,) int32; the image token stands once for each image part.
        weights: (S,) float32, factor on the loss of predicting this token; 0 where it is no target.
        image_order: for each placeholder, in order, the index into the record's images.
        stages: of a staged answer; a stage's closing token is with it.
    """

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    image_order: tuple[int, ...]
    stages: tuple[StageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of the rendered text that is a target."""

    start: int
    stop: int
    weight: float
    stage: str | None


class ChatEncoder:
    """Renders records with the checkpoint's own chat template and tokenizes them as the stock processor does.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        image_token_id: the placeholder's id.
    """

    def __init__(self, tokenizer: Any, image_token_id: int) -> None:
        self.tokenizer = tokenizer
        self.image_token_id = image_token_id
        self._end_of_turn: str = tokenizer.eos_token
        image_token = tokenizer.convert_ids_to_tokens(image_token_id)
        # In a record's text these would pass for the template's own; other special tokens (boxes, references) are
        # answers that the family gives.
        self._structural = [
            token
            for token in (
                image_token,
                "<|vision_start|>",
                "<|vision_end|>",
                "<|video_pad|>",
                "<|im_start|>",
                "<|im_end|>",
            )
            if token in tokenizer.get_vocab()
        ]

    @classmethod
    def from_checkpoint(cls, model: ModelConfig, image_token_id: int) -> ChatEncoder:
        """Load the checkpoint's tokenizer.

        Raises:
            ConfigError: it has none, a slow one, or no chat template.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model.name_or_path, revision=model.revision, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot load the tokenizer: {error}",
                where=model.name_or_path,
                do="copy or download the checkpoint again",
            ) from error
        if not tokenizer.is_fast:
            raise ConfigError(
                "has no fast tokenizer", where=model.name_or_path, do="add the checkpoint's tokenizer.json"
            )
        if image_token_id not in tokenizer.get_vocab().values():
            raise ConfigError(
                f"the tokenizer does not know the image token {image_token_id} of the config",
                where=model.name_or_path,
                do="add the checkpoint's tokenizer.json",
            )
        if not tokenizer.chat_template:
            raise ConfigError("has no chat template", where=model.name_or_path, do="use an Instruct checkpoint")
        return cls(tokenizer, image_token_id)

    def encode(self, record: Record) -> EncodedText:
        """Tokens, loss weights and image order of a whole record.

        Raises:
            DataError: the text holds the template's own tokens, or the template does not place every image.
        """
        messages = [self._message(turn, record) for turn in record.turns]
        text = self._render(messages)
        spans = self._target_spans(record, messages, text)
        encoding = self.tokenizer(text, return_offsets_mapping=True)
        ids = np.asarray(encoding["input_ids"], dtype=np.int32)
        starts = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
        weights = np.zeros(len(ids), dtype=np.float32)
        stages = []
        for span in spans:
            inside = (starts >= span.start) & (starts < span.stop)
            weights[inside] = span.weight
            if span.stage is not None and inside.any():
                places = np.flatnonzero(inside)
                stages.append(StageSpan(span.stage, int(places[0]), int(places[-1]) + 1))
        order = self._image_order(record, record.turns, ids)
        if not weights.any():
            raise DataError("no token of the record is a target", where=record.source, do=LEAVE_OUT)
        return EncodedText(ids, weights, order, tuple(stages))

    def encode_prompt(self, record: Record) -> EncodedText:
        """Everything before the last assistant turn, followed by the generation prompt; no targets."""
        turns = record.turns[: -1 if record.turns and record.turns[-1].role == "assistant" else None]
        messages = [self._message(turn, record) for turn in turns]
        text = self._render(messages, add_generation_prompt=True)
        ids = np.asarray(self.tokenizer(text)["input_ids"], dtype=np.int32)
        return EncodedText(ids, np.zeros(len(ids), dtype=np.float32), self._image_order(record, turns, ids))

    def _message(self, turn: Turn, record: Record) -> Message:
        for part in turn.content:
            if isinstance(part, Text):
                for token in self._structural:
                    if token in part.text:
                        raise DataError(
                            f"the text of a {turn.role} turn holds the special token {token}",
                            where=record.source,
                            do="take it out: images are placed by <image>",
                        )
        if turn.role == "user":
            content = [
                {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part.text}
                for part in turn.content
            ]
            return {"role": "user", "content": content}
        return {"role": turn.role, "content": "".join(p.text for p in turn.content if isinstance(p, Text))}

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        if not messages and not add_generation_prompt:
            return ""
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        )

    def _target_spans(self, record: Record, messages: list[Message], text: str) -> list[_Span]:
        spans: list[_Span] = []
        for position, turn in enumerate(record.turns):
            if turn.role != "assistant":
                continue
            head = self._render(messages[:position], add_generation_prompt=True)
            answer = messages[position]["content"]
            if not text.startswith(head + answer):
                raise DataError(
                    f"the chat template does not write turn {position + 1} as it would be generated",
                    where=record.source,
                    do="templates that rewrite or strip assistant turns (thinking models) are not supported",
                )
            end = text.find(self._end_of_turn, len(head) + len(answer))
            place = len(head)
            for part in turn.content:
                if isinstance(part, Text):
                    spans.append(_Span(place, place + len(part.text), part.weight, part.stage))
                    place += len(part.text)
            if end >= 0:
                last = spans[-1]
                spans.append(_Span(place, end + len(self._end_of_turn), last.weight, last.stage))
        return spans

    def _image_order(self, record: Record, turns: tuple[Turn, ...], ids: npt.NDArray[np.int32]) -> tuple[int, ...]:
        order = tuple(part.index for turn in turns for part in turn.content if isinstance(part, Image))
        placed = int((ids == self.image_token_id).sum())
        if placed != len(order):
            raise DataError(
                f"the chat template placed {placed} images where the record has {len(order)}",
                where=record.source,
                do="use the family's own chat template",
            )
        return order
