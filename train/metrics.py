"""Scores of generated answers."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from cache.records import Record, Text

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_MARK = re.compile(r"<\|\w+\|>")  # a box or a reference
_POINT = re.compile(rf"^\W*(?:[a-z]+\W+)?{_NUMBER.pattern}\s*[,;\s]\s*{_NUMBER.pattern}\W*$", re.IGNORECASE)


def answer_of(record: Record) -> str:
    """The text of the last turn, which a generated answer is compared with."""
    return "".join(part.text for part in record.turns[-1].content if isinstance(part, Text))


def normalize(text: str) -> str:
    """NFKC, lower case, white space collapsed, a final full stop dropped."""
    folded = " ".join(unicodedata.normalize("NFKC", text).lower().split())
    return folded.removesuffix(".").rstrip()


def exact_match(prediction: str, answer: str) -> bool:
    """Equal after normalization."""
    return normalize(prediction) == normalize(answer)


def token_f1(prediction: str, answer: str) -> float:
    """F1 over words of the normalized texts, as in SQuAD (arXiv 1606.05250), articles and punctuation kept."""
    predicted, wanted = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if not common:
        return float(predicted == wanted)
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def parse_point(text: str) -> tuple[float, float] | None:
    """The point that a text gives, if it is nothing but a point: `(91, 12)`, `91 12`, `x=0.5, y=0.25` is not one.

    The family's marks around it, as in `<|box_start|>(91, 12)<|box_end|>`, are passed over.
    """
    bare = _MARK.sub(" ", text).strip()
    if not _POINT.match(bare):
        return None
    x, y = (float(number) for number in _NUMBER.findall(bare)[:2])
    return x, y


def point_hit(prediction: str, answer: str, distance: float) -> bool | None:
    """Whether the predicted point lies within `distance` of the answer; None when the answer is no point.

    Of the prediction the first two numbers count, whatever stands around them.
    """
    wanted = parse_point(answer)
    if wanted is None:
        return None
    numbers = [float(number) for number in _NUMBER.findall(prediction)[:2]]
    return len(numbers) == 2 and math.dist(numbers, wanted) <= distance


def summarize(predictions: Sequence[str], answers: Sequence[str], *, point_distance: float) -> dict[str, float]:
    """Shares over all samples; `point_accuracy` over those whose answer is a point, left out when none is."""
    pairs = list(zip(predictions, answers, strict=True))
    if not pairs:
        return {}
    scores = {
        "exact_match": sum(exact_match(p, a) for p, a in pairs) / len(pairs),
        "token_f1": sum(token_f1(p, a) for p, a in pairs) / len(pairs),
    }
    hits = [hit for hit in (point_hit(p, a, point_distance) for p, a in pairs) if hit is not None]
    if hits:
        scores["point_accuracy"] = sum(hits) / len(hits)
    return scores
