"""A user's own policy, as given: DeepSpeed's ``injection_policy``, a transformers ``tp_plan``, or our own
words, from Python or from a file. Knows no model: what a policy means for one is in ``wishes``.

======================================  ============================================================
``{Block: ("attn.o", "mlp.down")}``     DeepSpeed: in every block of that class (or class name), the
                                        results of these linears need the sum over ranks
``{"layers.*.attn.q": "colwise"}``      transformers' styles, by module or parameter name
``{"layers.*.attn.q": "column"}``       our own: column, row, gather, vocab, replicate, experts
======================================  ============================================================

In a pattern ``*`` stands for one component of a name (a layer's number), and a leading ``*.`` for any
beginning.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from shoal.errors import UsageError
from shoal.plan.types import Operation

__all__ = ["DERIVED", "STYLES", "Policy", "nearest", "read_policy"]

DERIVED = "derived"
"""A style that says how a layout is reached, which is for measuring to find out: nothing is asked for."""

STYLES: Mapping[str, Operation | str] = {
    **{op: op for op in get_args(Operation) if op != "once"},
    # transformers/distributed/tensor_parallel.py and expert_parallel.py, 5.17 to 5.24.
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "packed_rowwise": "row",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "embedding_rowwise": "vocab",
    "grouped_gemm": "experts",
    # These take a whole input, or only say where sums and gradients travel: what is best there is derived.
    "rowwise_rep": DERIVED,
    "rowwise_split_input": DERIVED,
    "moe_tp_experts": DERIVED,
    "moe_identity_expert": DERIVED,
    "ep_router": DERIVED,
    "ep_dispatch_experts": DERIVED,
    "megamoe_router": DERIVED,
    "megamoe_experts": DERIVED,
    "mla_kv_a_proj": DERIVED,
    "replicated_with_grad_allreduce": DERIVED,
    "all_reduce": DERIVED,
    "local_params": DERIVED,
}

_NOT_BUILT = {
    "sequence_parallel": "activations split along the sequence are not built",
    "embedding_colwise": "embeddings are split by rows here: say vocab",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Entries in the order given: a style for a pattern, or names of summed linears for a class of blocks."""

    entries: tuple[tuple[str, str | tuple[str, ...]], ...]

    def text(self) -> str:
        """The whole of it in one line, equal for equal policies: part of a plan's identity."""
        return json.dumps(self.entries)


def read_policy(policy: Policy | Mapping[Any, Any] | str | Path | None) -> Policy | None:
    """Check a policy's form.

    Args:
        policy: a mapping (see the head of this file), the path of a JSON or YAML file that holds one
            (classes by their names), or None.

    Returns:
        the policy, or None where nothing is asked for.

    Raises:
        UsageError: no such file, or a key or value of a wrong type, or an unknown style; it names the key.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, (str, Path)):
        policy = _from_file(Path(policy))
    if not isinstance(policy, Mapping):
        raise _wrong(f"a mapping or the path of a file is wanted, not {type(policy).__name__}")
    entries = tuple((_key(key), _value(_key(key), value)) for key, value in policy.items())
    return Policy(entries) if entries else None


def _from_file(path: Path) -> Any:
    """What a JSON or YAML file says; JSON is YAML too."""
    import yaml

    try:
        text = path.expanduser().read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:  # of which YAML would take the last without a word
            raise _wrong(f"{path}: {twice}: it is there twice")
        return yaml.safe_load(text) or {}
    except OSError as error:
        raise _wrong(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(f"{path}: neither JSON nor YAML: {error}") from None


def _key(key: object) -> str:
    name = key.__name__ if isinstance(key, type) else key
    if not isinstance(name, str) or not name:
        raise _wrong(f"{key!r}: a key is the class of a block, its name, or a pattern of module names")
    return name


def _value(key: str, value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        if value in _NOT_BUILT:
            raise _wrong(f"{key}: {value}: {_NOT_BUILT[value]}")
        if value not in STYLES and "*" in key:
            raise _wrong(f"{key}: unknown style {value!r}; {nearest(value, STYLES)}")
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(name, str) and name for name in value):
        return tuple(cast(Iterable[str], value))
    raise _wrong(
        f"{key}: {value!r}: a value is a style ({', '.join(STYLES)}) or, for a class of blocks, the names of "
        "the linears in it whose results are summed over ranks"
    )


def nearest(name: str, known: Iterable[str], count: int = 5) -> str:
    """``nearest are: ...``, or some of what there is."""
    known = list(dict.fromkeys(filter(None, known)))  # the whole model's name is empty
    close = difflib.get_close_matches(name, known, count, cutoff=0.5)
    shown = ", ".join(close or known[:count])
    return f"nearest are: {shown}" if close else f"there are: {shown}{', ...' * (len(known) > count)}"


def _wrong(message: str) -> UsageError:
    return UsageError(f"policy: {message}", field="policy")
