"""Small drawn screenshots with questions about them: a task that cannot be answered without looking at the image."""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
}
TITLES = ("Mail", "Settings", "Files", "Photos")
LABELS = ("Save", "Open", "Send", "Help", "Edit", "Copy", "Undo", "Next")
# Multiples of 32, what one image token covers in the tiny model, so that nothing is resized. The higher one has a
# footer below the same layout: a few hundred images teach an adapter where things are, not how a layout scales.
SIZES = ((128, 96), (128, 128))
STOPS = (16, 48, 80, 112)  # where the slider can be: x in pixels, the middles of the image tokens
SLIDER_Y = 80

Question = tuple[str, str]


def make_screenshots(folder: Path, *, train_images: int = 480, val_images: int = 80, seed: int = 0) -> None:
    """Draw screenshots of a window with a title, two buttons and a slider, and write questions about them.

    Writes `folder/images/*.png`, `folder/train.jsonl` and `folder/val.jsonl`, one flat VQA row a line: `id`, `image`
    (relative to `folder`), `question`, `answer`. Each image has four questions: what the title says (4 words), the
    colour of the left and of the right button (4 colours), and the point of the slider (4 places, x and y in pixels).
    Whoever guesses without looking is right about 25 % of the time. The splits are drawn by the same generator and
    share no image. The same arguments give the same files.

    Args:
        folder: made if missing; files of the same names are replaced.
        train_images: number of images of the train split.
        val_images: number of images of the val split.
        seed: of the drawings.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)  # noqa: S311
    drawn: set[bytes] = set()
    for split, images in (("train", train_images), ("val", val_images)):
        lines = []
        for index in range(images):
            picture, questions = _draw_new(generator, drawn)
            name = f"{split}_{index:04d}"
            picture.save(folder / "images" / f"{name}.png")
            for number, (question, answer) in enumerate(questions):
                row = {"id": f"{name}_{number}", "image": f"images/{name}.png", "question": question, "answer": answer}
                lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _draw_new(generator: random.Random, drawn: set[bytes]) -> tuple[Image.Image, list[Question]]:
    # Two equal drawings would be one image to the cache, and a val image among those trained on.
    while True:
        picture, questions = _draw(generator)
        pixels = picture.tobytes()
        if pixels not in drawn:
            drawn.add(pixels)
            return picture, questions


def _draw(generator: random.Random) -> tuple[Image.Image, list[Question]]:
    width, height = generator.choice(SIZES)
    background = (generator.randint(150, 180),) * 3
    picture = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(picture)
    if height > 96:
        pen.rectangle((0, 96, width, height), fill=(200, 200, generator.randint(200, 215)))
    questions = [_draw_title(pen, generator, width)]
    colours = generator.sample(sorted(COLOURS), 2)
    labels = generator.sample(LABELS, 2)
    for side, colour, label, middle in zip(("left", "right"), colours, labels, (32, 96), strict=True):
        _draw_button(pen, generator, colour, label, middle)
        questions.append((f"What colour is the {side} button?", colour))
    questions.append(_draw_slider(pen, generator, width))
    return picture, questions


def _draw_title(pen: ImageDraw.ImageDraw, generator: random.Random, width: int) -> Question:
    title = generator.choice(TITLES)
    pen.rectangle((0, 0, width, 17), fill=(40, 40, generator.randint(60, 90)))
    pen.text((4, 9), title, fill="white", anchor="lm", font=ImageFont.load_default(14))
    return "What does the title say?", title


def _draw_button(pen: ImageDraw.ImageDraw, generator: random.Random, colour: str, label: str, middle: int) -> None:
    x, y = middle + generator.randint(-2, 2), 40 + generator.randint(-1, 2)
    pen.rectangle((x - 28, y - 20, x + 28, y + 20), fill=COLOURS[colour])
    ink = "black" if colour == "yellow" else "white"
    pen.text((x, y), label, fill=ink, anchor="mm", font=ImageFont.load_default(11))


def _draw_slider(pen: ImageDraw.ImageDraw, generator: random.Random, width: int) -> Question:
    x, y = generator.choice(STOPS), SLIDER_Y
    pen.rectangle((4, y - 11, width - 4, y + 11), fill=(30, 30, 30))
    pen.rectangle((x - 12, y - 11, x + 12, y + 11), fill="white")
    return "Click the slider. Answer with the point.", f"({x}, {y})"
