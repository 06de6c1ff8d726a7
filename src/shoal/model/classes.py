"""Which class a config asks for: decoders, encoders with their heads, encoder-decoders, a checkpoint's own
code. Reads no weights, and knows no model by name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from shoal.errors import UnsupportedError

__all__ = ["architecture_class", "class_from_code", "reading_code"]

_log = logging.getLogger("shoal.model")
_one_at_a_time = threading.RLock()


@contextmanager
def reading_code() -> Iterator[None]:
    """While a checkpoint's own code is read: transformers parses it, and before Python 3.13 two threads that
    parse at once disturb each other ("AST constructor recursion depth mismatch").
    """
    with _one_at_a_time:
        yield


def class_from_code(reference: str, path: Path) -> type[PreTrainedModel]:
    """A class in the code of the checkpoint in a folder, which is run."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with reading_code():
        found: type[PreTrainedModel] = get_class_from_dynamic_module(reference, path)
    return found


def architecture_class(
    config: Any, path: Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class named by the config's ``architectures``, in the checkpoint's own code or in transformers;
    where none is named, what the auto classes have for the config.

    Args:
        config: of a transformers model.
        path: the checkpoint's folder, which may hold the class's code; None where there is none.
        trust_remote_code: whether that code may be run.

    Raises:
        UnsupportedError: there is no such class, or its code is not trusted.
    """
    named = _named(config)
    reference = next(_from_code(getattr(config, "auto_map", None) or {}, named, config), None)
    if reference is not None and trust_remote_code and path is not None:
        return class_from_code(reference, path)
    own = getattr(transformers, named, None) if named else None
    if isinstance(own, type) and issubclass(own, PreTrainedModel):
        return own
    if reference is not None:
        raise UnsupportedError(
            f"model: {named or reference} comes as code beside the checkpoint; pass trust_remote_code if you "
            "trust it",
            field="trust_remote_code",
        )
    for name in _auto_classes(config):
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            entry = mapping[type(config)]
            chosen: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
            if named:
                _log.warning("transformers has no class %s; %s is taken", named, chosen.__name__)
            return chosen
    raise UnsupportedError(
        f"model: transformers has no class {named!r} for {type(config).__name__}", field="model"
    )


def _named(config: Any) -> str | None:
    """The first of the config's ``architectures``; a name alone counts as a list of one.

    Raises:
        UnsupportedError: it holds no names.
    """
    found = getattr(config, "architectures", None) or None
    first = found[0] if isinstance(found, (list, tuple)) else found
    if first is not None and not isinstance(first, str):
        raise UnsupportedError(
            f"model: architectures in its config is {found!r}, but a list of class names is wanted",
            field="model",
        )
    return first


def _auto_classes(config: Any) -> Iterator[str]:
    """The auto classes that may know the config, the most telling one first.

    What can be both a masked and a causal model is an encoder unless its config says that it decodes.
    """
    if getattr(config, "is_encoder_decoder", False):
        yield "AutoModelForSeq2SeqLM"
    if not getattr(config, "is_decoder", False):
        yield "AutoModelForMaskedLM"
    yield from ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    yield from ("AutoModelForSequenceClassification", "AutoModelForQuestionAnswering", "AutoModel")


def _from_code(remote: Mapping[str, Any], named: str | None, config: Any) -> Iterator[str]:
    """References to classes in the checkpoint's own code, the named one first."""
    references = {name: value for name, value in remote.items() if isinstance(value, str)}
    yield from (value for value in references.values() if named and value.rpartition(".")[2] == named)
    yield from (references[name] for name in _auto_classes(config) if name in references)
