"""Small drawn screenshots with questions about them: a task that cannot be answered without looking at the image."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

# Far apart from each other in every way that a random tower could mix up.
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "black": (20, 20, 20),
}
WORDS = ("Save", "Open", "Send", "Help", "Edit", "Copy", "Undo", "Next")
TITLES = ("Mail", "Settings", "Files", "Photos")
SIDES = ("left", "right")
# Multiples of 32, what one merged image token covers, so that nothing is resized.
SIZES = ((128, 96), (160, 96), (128, 128))
STOPS = (12, 37, 62, 87)


def make_screenshots(folder: Path, *, train_images: int = 480, val_images: int = 80, seed: int = 0) -> None:
    """Draw screenshots of a window with two questions and write questions about them.

    Writes `folder/images/*.png`, `folder/train.jsonl` and `folder/val.jsonl`, one flat VQA row a line: `id`, `image`
    (relative to `folder`), `question`, `answer`. Each image has four questions: the colour of the left and of the right
    button, and where to click (in percent of the width and height) for either colour. The splits are drawn by the same
    generator and share no image. The same arguments give the same files.

    Args:
        folder: made if missing.
        train_images: number of images of the train split.
        val_images: number of images of the val split.
        seed: of the drawings.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)  # noqa: S311
    drawn: set[bytes] = set()
    for split, images in (("train", train_images), ("val", val_images)):
        rows: list[dict[str, str]] = []
        for index in range(images):
            picture, questions = _draw_new(generator, drawn)
            name = f"{split}_{index:04d}"
            picture.save(folder / "images" / f"{name}.png")
            rows += [
                {"id": f"{name}_{number}", "image": f"images/{name}.png", "question": question, "answer": answer}
                for number, (question, answer) in enumerate(questions)
            ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def _draw_new(generator: random.Random, drawn: set[bytes]) -> tuple[Image.Image, list[tuple[str, str]]]:
    # Two equal drawings would be one image to the cache, and a val image among those trained on.
    while True:
        picture, questions = _draw(generator)
        pixels = picture.tobytes()
        if pixels not in drawn:
            drawn.add(pixels)
            return picture, questions


def _draw(generator: random.Random) -> tuple[Image.Image, list[tuple[str, str]]]:
    width, height = generator.choice(SIZES)
    picture = Image.new("RGB", (width, height), (generator.randint(150, 180),) * 3)
    pen = ImageDraw.Draw(picture)
    title = generator.choice(TITLES)
    pen.rectangle((0, 0, width, 17), fill=(40, 40, generator.randint(60, 90)))
    pen.text((4, 9), title, fill="white", anchor="lm", font=ImageFont.load_default(14))
    questions = [("What does the title say?", title)]
    colours = generator.sample(sorted(COLOURS), 2)
    words = generator.sample(WORDS, 2)
    for side, colour, word, middle in zip(SIDES, colours, words, (width // 4, 3 * width // 4), strict=True):
        x, y = middle + generator.randint(-2, 2), 38 + generator.randint(-2, 2)
        half = (width // 4 - 4, 20)
        ink = "white" if sum(COLOURS[colour]) < 420 else "black"
        pen.rectangle((x - half[0], y - half[1], x + half[0], y + half[1]), fill=COLOURS[colour])
        pen.text((x, y), word, fill=ink, anchor="mm", font=ImageFont.load_default(11))
        questions.append((f"What colour is the {side} button?", colour))
    stop = generator.choice(STOPS)
    x, y = width * stop // 100, height * 83 // 100
    pen.line((8, y, width - 8, y), fill=(60, 60, 60), width=3)
    pen.rectangle((x - 7, y - 11, x + 7, y + 11), fill=(250,250,250), outline=(20,20,20))
    questions.append(("Click the slider. Answer with the point.", f"({stop}, 83)"))
    return picture, questions
