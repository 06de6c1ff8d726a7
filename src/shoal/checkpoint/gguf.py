"""Turning a GGUF file into a model folder: float32 safetensors, config, tokenizer. Knows no cache.

GGUF's block formats are unpacked by the ``gguf`` package; names, layouts, config and tokenizer come from
transformers' reading of GGUF. (Its ``from_pretrained(gguf_file=...)`` is not used: it asks for a package
more, and refuses to save what it loaded.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["GgufFile", "convert", "open_gguf"]

_FLOAT32_BYTES = 4

# transformers' names of special tokens, and GGUF's of their ids.
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file. Opening takes seconds: every token of the vocabulary is read."""

    path: Path
    reader: Any  # gguf.GGUFReader

    @property
    def dequantised_bytes(self) -> int:
        """Bytes of its weights in float32."""
        return sum(_FLOAT32_BYTES * int(tensor.n_elements) for tensor in self.reader.tensors)


def open_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header.

    Raises:
        CheckpointError: not a GGUF file, or a damaged one.
    """
    from gguf import GGUFReader

    try:
        return GgufFile(path, GGUFReader(path))
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a GGUF file, or a damaged one ({error})") from error


def convert(file: GgufFile, folder: Path, progress: Callable[[float, float], None]) -> None:
    """Write a GGUF file's model into an empty folder. Holds the float32 weights in memory meanwhile.

    Args:
        file: the model.
        folder: where ``config.json``, ``generation_config.json``, the weights and the tokenizer go.
        progress: called with tensors done and tensors in all.

    Raises:
        CheckpointError: the file is damaged, or lacks weights.
        UnsupportedError: an architecture transformers cannot read out of a GGUF file.
    """
    from transformers import AutoTokenizer

    path = file.path
    model = _empty_model(_config(path))
    _fill(model, _dequantise(file, model, progress), path)
    _save(model, folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise CheckpointError(f"{path}: no tokenizer can be made from its vocabulary ({error})") from error
    _set_special_tokens(tokenizer, file)
    tokenizer.save_pretrained(folder)


def _config(path: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{path}: transformers cannot read this GGUF file: {error}", field="model"
        ) from error


def _empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model a config describes, on meta: the class it names, or one that generates, or the bare one."""
    import torch
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    with torch.device("meta"):
        for model_class in named:
            if model_class is not None:
                return model_class(config)
        for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
            if type(config) in auto._model_mapping:
                return auto.from_config(config, dtype=torch.float32)
        return AutoModel.from_config(config, dtype=torch.float32)


def _dequantise(
    file: GgufFile, model: PreTrainedModel, progress: Callable[[float, float], None]
) -> dict[str, torch.Tensor]:
    """The file's weights in float32, by the model's names."""
    import numpy
    import torch
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = file.reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = _names(file, model, processor)
    made: dict[str, Any] = {"tensors": {}}
    for done, tensor in enumerate(file.reader.tensors):
        weights = dequantize(tensor.data, tensor.tensor_type)
        # A processor undoes llama.cpp's layout changes; one for experts writes into made["tensors"] itself.
        result = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters=made
        )
        if result.name in names:
            made["tensors"][names[result.name]] = torch.from_numpy(numpy.array(result.weights, numpy.float32))
        progress(done + 1, len(file.reader.tensors))
    tensors: dict[str, torch.Tensor] = made["tensors"]
    return tensors


def _names(file: GgufFile, model: PreTrainedModel, processor: Any) -> dict[str, str]:
    """The model's names by the file's."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # transformers asks every submodule in turn, building a table each time, for the few models whose
    # names only fit from inside: seconds that are spared where the whole model's names fit.
    whole = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    names: dict[str, str] = get_gguf_hf_weights_map(whole, processor)
    if all(tensor.name in names for tensor in file.reader.tensors):
        return names
    names = get_gguf_hf_weights_map(model, processor)
    return names


def _fill(model: PreTrainedModel, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Put the weights into the model, tied ones once.

    Raises:
        CheckpointError: weights the model needs are not in the file, or have other shapes.
    """
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: weights of other shapes than its header says: {error}") from error
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{path}: these weights are missing: {', '.join(missing[:8])}")


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write weights (tied ones under their owner's name) and configs, as ``save_pretrained`` names them."""
    from huggingface_hub import save_torch_state_dict

    tied = model.all_tied_weights_keys
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    save_torch_state_dict(weights, folder)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _set_special_tokens(tokenizer: Any, file: GgufFile) -> None:
    """Take the special tokens from the file itself: transformers 5.17 confuses them (5.24 does not)."""
    for name, key in _SPECIAL_TOKENS.items():
        field = file.reader.fields.get(f"tokenizer.ggml.{key}")
        if field is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False
    for stale in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "model_type"):
        tokenizer.init_kwargs.pop(stale, None)
