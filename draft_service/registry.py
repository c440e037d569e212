"""Finds the drafters that `--drafters` names."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from draft_service.combination import Combination
from draft_service.drafter import Drafter
from draft_service.settings import DraftSettings
from specdec.serving import StartError

GROUP = "specdec.drafters"


def make_drafter(settings: DraftSettings) -> Drafter:
    """The drafter, or the combination of drafters, that the settings name.

    Raises:
        StartError: a name is unknown or cannot be loaded, or they do not go together.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name in settings.drafters:
        if name not in found:
            known = ", ".join(sorted(found))
            raise StartError(f"--drafters: there is no drafter {name!r}; there are {known}")
    if len(set(settings.drafters)) < len(settings.drafters):
        raise StartError("--drafters: each may be named once")
    drafters = [_class_of(found[name], settings)(settings) for name in settings.drafters]
    for name, drafter in zip(settings.drafters[:-1], drafters, strict=False):
        if not drafter.any_tokenizer:
            raise StartError(f"--drafters: {name} must come last, for it always drafts something")
    if settings.model is not None and drafters[-1].any_tokenizer:
        raise StartError("--model names a model, but none of --drafters runs one: add model")
    if settings.target_tokenizer is not None and drafters[-1].any_tokenizer:
        raise StartError("--target-tokenizer is for a model, but none of --drafters runs one")
    if settings.remember_outputs and "suffix" not in settings.drafters:
        raise StartError("--remember-outputs is for suffix, which --drafters does not name")
    return drafters[0] if len(drafters) == 1 else Combination(settings, drafters)


def _class_of(point: EntryPoint, settings: DraftSettings) -> type[Drafter]:
    if point.name == "model" and settings.target_tokenizer is not None:
        from draft_service.translated_drafter import TranslatedDrafter

        return TranslatedDrafter
    return _load(point)


def _load(point: EntryPoint) -> type[Drafter]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise StartError(f"--drafters: {point.name} cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        raise StartError(f"--drafters: {point.name} names {point.value}, which is no Drafter")
    return loaded
