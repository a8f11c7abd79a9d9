"""The only door from this package to `models`: opening a checkpoint by path or name, and writing a model."""

from __future__ import annotations

from typing import Any

from prefix_reuse.errors import ConfigError, UnsupportedAttentionError


def load_model(path_or_name: Any, **options: Any) -> Any:
    """`models.load`, with errors of this package for a foreign `models` package and for MLA/DSA checkpoints."""
    models = _models()
    try:
        return models.load(path_or_name, **options)
    except models.UnsupportedAttentionError as error:
        raise UnsupportedAttentionError(str(error)) from error


def save_model(model: Any, folder: Any) -> None:
    """`models.save`."""
    _models().save(model, folder)


def check_target(folder: Any) -> None:
    """Raises what `save_model` would raise for its folder, before there is a model."""
    _models().check_folder(folder)


def _models() -> Any:
    try:
        import models
    except ImportError as error:
        raise ConfigError(
            "the `models` package of prefix-reuse cannot be imported; is the project installed?"
        ) from error
    if not hasattr(models, "load") or not hasattr(models, "UnsupportedAttentionError"):
        where = getattr(models, "__file__", None) or next(iter(getattr(models, "__path__", ["?"])))
        raise ConfigError(
            f"another package named `models` is in the way ({where}): run from another folder, "
            "or build the model yourself and give it to Engine(model)"
        )
    return models
