"""Shapes of models that are not published: from configurations in a directory, and those that targets name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvpressure.capacity import models, shapes
from kvpressure.capacity.shapes import ModelShape
from kvpressure.errors import InputError

MAX_FILES: Final = 1000  # configurations that are read of a directory

logger = logging.getLogger(__name__)
_published = lru_cache(maxsize=256)(models.known)
_named = lru_cache(maxsize=256)(models.named)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Lookup of model shapes. ``own``: by the last part of a model's name, lower case; they override published ones.
    ``of_targets``: by target name, whatever its model is called.
    """

    own: Mapping[str, ModelShape] = field(default_factory=dict)
    of_targets: Mapping[str, ModelShape] = field(default_factory=dict)

    def find(self, names: Iterable[str], target: str = "") -> ModelShape | None:
        """The shape of the model that ``target`` serves, else of the first known name; None without one."""
        if target in self.of_targets:
            return self.of_targets[target]
        for name in names:
            shape = self.own.get(_key(name)) if self.own else None
            if shape is not None:
                return shape
            published = _published(name)
            if published is not None:
                return _named(published)
        return None


def read(directory: Path | None, targets: Mapping[str, str]) -> ModelShapes:
    """The shapes of a directory, and those that targets name (target -> file, directory or published name). Raises
    ``InputError`` for a target's.

    ``NAME.json``, ``NAME/config.json`` and ``ORG/NAME/config.json`` are the model NAME. A file that cannot be used
    costs itself, and is logged.
    """
    return ModelShapes(
        {} if directory is None else dict(_in(directory)),
        {target: models.find(text)[0] for target, text in targets.items()},
    )


def _in(directory: Path) -> Iterator[tuple[str, ModelShape]]:
    found = sorted((*directory.glob("*.json"), *directory.glob("*/config.json"), *directory.glob("*/*/config.json")))
    for path in (one for one in found[:MAX_FILES] if "/." not in str(one.relative_to(directory.parent))):
        try:
            yield _key(path.parent.name if path.name == "config.json" else path.stem), shapes.load(path)
        except InputError as error:
            logger.warning("model configuration not used: %s", error)


def _key(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
