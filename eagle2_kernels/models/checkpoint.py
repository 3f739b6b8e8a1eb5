"""Files of draft heads: public EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints, and what `save` writes.

Tensors of a head of width H, vocabulary V and draft vocabulary Vd, for a target of width T::

    EAGLE-1/2                                        EAGLE-3
    fc.weight [H, 2H], fc.bias [H]?                  fc.weight [H, 3T]
    layers.0.self_attn.{q,k,v,o}_proj.weight         midlayer.self_attn.* (q, k, v read 2H)
    layers.0.mlp.{gate,up,down}_proj.weight          midlayer.mlp.*
    layers.0.post_attention_layernorm.weight [H]     midlayer.{input_layernorm, hidden_norm,
                                                     post_attention_layernorm}.weight [H]
                                                     norm.weight [H]
    lm_head.weight [Vd, H]?                          lm_head.weight [Vd, H]?
    embed_tokens.weight [V, H]?  d2t int64 [Vd]?  t2d bool [V]?

``?`` may be absent: an absent embedding or lm_head is the target's. q, k and v may have biases.
``d2t`` holds offsets (target id = draft id + d2t[draft id]), ``t2d`` marks the target ids that have
a draft id; `draft_to_target` holds the target ids themselves, and may stand in place of both.
``layers.0`` and ``midlayer`` are one and the same, and a ``model.`` in front is dropped.

Three projects write such files; these differences between them are read:

* EAGLE: ``pytorch_model.bin``, Llama's configuration, ``bias`` for fc's bias, rope_theta often
  absent (10 000).
* SpecForge: safetensors; ``eagle_config.eagle_aux_hidden_state_layer_ids`` lists the layers whose
  OUTPUTS are the features; ``fc_norm`` (``fc_norm.{i}.weight`` [T]) and ``norm_output`` are its
  EAGLE-3.1.
* speculators: the layer's shape lies in ``transformer_layer_config``; a top-level
  ``eagle_aux_hidden_state_layer_ids`` counts INPUTS (id j is the output of layer j - 1, as vLLM
  counts); ``norm_before_residual``, ``norm_before_fc`` (``input_norm.weight`` [3T]), Qwen3's
  ``q_norm`` and ``k_norm``; its EAGLE-1 heads name fc ``fusion_fc`` and the layer ``transformer``.

Refused by name: heads of several layers, MLA or expert layers, rotations other than plain, linear
and Llama 3, EAGLE-1 heads with extra norms (``layernorms``), quantised weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .heads import Eagle3Head, EagleConfig, EagleHead

__all__ = ["load_head", "save_head"]

_CONFIG = "config.json"
_SAFETENSORS = "model.safetensors"
_PICKLE = "pytorch_model.bin"

# Finds one file of a head by its name; None when there is none.
_Files = Callable[[str], Path | None]

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Rotations stretched for long contexts, and the numbers they need.
_ROTATIONS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
# A head's names where they are not those of the table above.
_RENAMED = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
# Training leaves these beside a head; decoding has no use for them.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
_EAGLE3_ONLY = (
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "norm.weight",
    "input_norm.weight",
)


def load_head(
    source: str | os.PathLike[str],
    target: nn.Module | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> EagleHead:
    """Load a head from a folder or a hub name, of the kind its files are of, bound to ``target``.

    Args:
        source: a folder with config.json and safetensors or .bin weights (one file, or shards with
            an index), or a hub name.
        target: the Hugging Face causal LM to draft for; None leaves the head unbound.
        dtype: the target's by default, else the file's.

    Pickles are read as tensors alone. Values are not looked at, but ids are: `d2t` must give
    distinct ids of the vocabulary, and `t2d` must mark exactly these.

    Raises:
        FileNotFoundError: config.json or the weights are not there.
        ValueError: a file that cannot be read or holds more than tensors; else one error that lists
            everything that does not fit: configuration, unknown and missing keys (the first of
            many), shapes, ids, the target's width, vocabulary and layers.
    """
    files = _locate(source)
    raw = _read_config(files, source)
    tensors, problems = _rename(_read_tensors(files, source))
    eagle3 = _is_eagle3(raw, tensors)
    ids = {name: tensors.pop(name, None) for name in ("d2t", "t2d", "draft_to_target")}
    embedding = tensors.pop("embed_tokens.weight", None)
    skeleton, table = _read_shape(raw, tensors, ids, eagle3, problems)
    if skeleton is not None:
        _check_surroundings(skeleton, embedding, target, problems)
    if problems or skeleton is None:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(f"head in {source} does not fit:\n{listed}")
    weight = None if target is None else target.get_input_embeddings().weight
    head = type(skeleton)(
        skeleton.config,
        table,
        dtype=dtype or (tensors["fc.weight"] if weight is None else weight).dtype,
        device=None if weight is None else weight.device,
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    if embedding is not None:
        head.set_embedding(embedding)
    return head if target is None else head.bind(target)


def save_head(head: EagleHead, directory: str | os.PathLike[str], *, embedding: bool) -> None:
    """Write config.json and model.safetensors as the table above has them; see `EagleHead.save`."""
    from safetensors.torch import save_file

    if embedding and head.embed_weight is None:
        raise ValueError("embedding: expected a head bound to a target, this one has no embedding")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = dict(head.named_parameters())
    if isinstance(head, Eagle3Head):
        weights = {name.replace("layers.0.", "midlayer."): w for name, w in weights.items()}
    if head.embed_weight is not None and (embedding or head.own_embedding):
        weights["embed_tokens.weight"] = head.embed_weight * head.embed_scale
    tensors = {name: w.detach().to("cpu", torch.bfloat16) for name, w in weights.items()}
    if head.draft_to_target is not None:
        table = head.draft_to_target.cpu()
        tensors["d2t"] = table - torch.arange(len(table))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][table] = True
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    save_file(tensors, path / _SAFETENSORS, metadata={"format": "pt"})
    # safetensors makes its file private to the user.
    (path / _SAFETENSORS).chmod(0o644)
    (path / _CONFIG).write_text(json.dumps(_public_config(head), indent=2, sort_keys=True) + "\n")


def _public_config(head: EagleHead) -> dict[str, Any]:
    c = head.config
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "attention_bias": c.attention_bias,
        "vocab_size": c.vocab_size,
    }
    optional = {
        "draft_vocab_size": c.draft_vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "final_logit_softcapping": c.final_logit_softcapping,
        "target_hidden_size": c.target_hidden_size,
    }
    if isinstance(head, Eagle3Head):
        data["architectures"] = ["LlamaForCausalLMEagle3"]
        optional["draft_vocab_size"] = c.draft_vocab_size or c.vocab_size
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            optional[name] = getattr(c, name) or None
        if c.aux_layers is not None:
            data["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
                "use_aux_hidden_state": True,
            }
    else:
        data["bias"] = c.fc_bias
    return data | {name: value for name, value in optional.items() if value is not None}


def _locate(source: str | os.PathLike[str]) -> _Files:
    folder, name = Path(source), str(source)
    if folder.is_dir():

        def in_folder(file: str) -> Path | None:
            return folder / file if (folder / file).is_file() else None

        return in_folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise FileNotFoundError(f"directory: expected a head's folder or a hub name, got {source}")

    def on_hub(file: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(name, file))
        except EntryNotFoundError:
            return None

    return on_hub


def _read_config(files: _Files, source: Any) -> dict[str, Any]:
    path = files(_CONFIG)
    if path is None:
        raise FileNotFoundError(f"directory: expected a head's {_CONFIG} in {source}")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _read_tensors(files: _Files, source: Any) -> dict[str, Tensor]:
    for name, read in ((_SAFETENSORS, _read_safetensors), (_PICKLE, _read_pickle)):
        if (path := files(name)) is not None:
            return read(path)
        if (index := files(f"{name}.index.json")) is not None:
            tensors: dict[str, Tensor] = {}
            for shard in _shards(index):
                if (path := files(shard)) is None:
                    raise FileNotFoundError(f"{index} lists {shard}, which is not beside it")
                tensors |= read(path)
            return tensors
    raise FileNotFoundError(f"directory: expected {_SAFETENSORS} or {_PICKLE} in {source}")


def _shards(index: Path) -> list[str]:
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(f"{index}: expected weight_map, an object of file names")
    names = sorted(set(shards.values()))
    # A name that leads elsewhere is an attack, not a shard.
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index}: expected plain file names, got {strange}")
    return names


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file ({error})") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Of damaged and hostile bytes torch's readers raise errors of many types.
        raise ValueError(
            f"{path}: expected tensors alone, got a damaged file or one with other objects, "
            "whose loading could run code; it was not loaded"
        ) from error
    if not isinstance(tensors, dict):
        raise ValueError(f"{path}: expected tensors by name, got {type(tensors).__name__}")
    strange = [str(k) for k, v in tensors.items() if not isinstance(v, Tensor)]
    if strange:
        raise ValueError(f"{path}: expected tensors alone, got other values under {strange[:9]}")
    return tensors


def _rename(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under this package's names; names given twice are a problem."""
    renamed: dict[str, Tensor] = {}
    twice = []
    for key, tensor in tensors.items():
        name = str(key).removeprefix("model.")
        for theirs, ours in _RENAMED:
            if name.startswith(theirs):
                name = ours + name[len(theirs) :]
        if name in _UNUSED or name.endswith("rotary_emb.inv_freq"):
            continue
        if name in renamed:
            twice.append(name)
        renamed[name] = tensor
    return renamed, [f"keys given twice: {', '.join(sorted(twice))}"] if twice else []


def _is_eagle3(raw: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    if any(name in tensors for name in _EAGLE3_ONLY):
        return True
    named = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    return "eagle3" in named


def _read_shape(
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    ids: dict[str, Tensor | None],
    eagle3: bool,
    problems: list[str],
) -> tuple[EagleHead | None, Tensor | None]:
    """The head without memory behind its weights, or None without usable sizes; draft vocabulary.

    Lists what does not fit in the configuration, and in the names, shapes and dtypes of tensors.
    """
    data = _object(raw, "transformer_layer_config", problems)
    data = data | {k: v for k, v in raw.items() if v is not None}
    kind = data.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        problems.append(f"speculators_model_type: expected eagle or eagle3, got {kind!r}")
    if data.get("layernorms"):
        problems.append("layernorms: an EAGLE-1 head with extra norms is not supported")
    if (act := data.get("hidden_act", "silu")) != "silu":
        problems.append(f"hidden_act: expected silu, got {act!r}")
    sizes = _sizes(data, problems)
    theta, scaling = _rotation(data, problems)
    flags: dict[str, Any] = {}
    if eagle3:
        flags["aux_layers"] = _aux_layers(data, problems)
        flags["norm_before_residual"] = bool(data.get("norm_before_residual"))
        flags["norm_output"] = bool(data.get("norm_output"))
        flags["norm_before_fc"] = bool(data.get("norm_before_fc")) or "input_norm.weight" in tensors
        flags["fc_norm"] = bool(data.get("fc_norm")) or any(
            name.startswith("fc_norm.") for name in tensors
        )
    elif sizes:
        sizes.pop("target_hidden_size", None)
    eps = _number(data, "rms_norm_eps", EagleConfig.rms_norm_eps, problems)
    cap = _number(data, "final_logit_softcapping", None, problems)
    if sizes is None:
        # Names do not depend on sizes: the keys can be compared all the same.
        sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), 2)
        sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
        known, table = False, None
    else:
        known, (sizes["draft_vocab_size"], table) = True, _draft_table(sizes, ids, problems)
    attention = "layers.0.self_attn."
    config = EagleConfig(
        **sizes,
        **flags,
        rms_norm_eps=eps,
        rope_theta=theta,
        rope_scaling=scaling,
        fc_bias="fc.bias" in tensors,
        attention_bias=any(f"{attention}{x}_proj.bias" in tensors for x in "qkv"),
        qk_norm=any(f"{attention}{x}_norm.weight" in tensors for x in "qk"),
        own_lm_head="lm_head.weight" in tensors,
        final_logit_softcapping=cap,
    )
    size = config.draft_vocab_size
    try:
        empty = None if size is None else torch.empty(size, dtype=torch.int64, device="meta")
        head = (Eagle3Head if eagle3 else EagleHead)(config, empty, device="meta")
    except RuntimeError:
        # Numbers of elements overflow.
        problems.append(f"{_CONFIG}: its sizes are too large for any tensor")
        return None, None
    _compare_tensors(head, tensors, known, problems)
    return (head if known else None), table


def _sizes(data: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """The configuration's sizes, absent ones derived; None when one is missing or senseless."""
    before = len(problems)
    sizes: dict[str, Any] = {}
    for name in _SIZES:
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            sizes[name] = value
        elif value is not None:
            problems.append(f"{name}: expected an int of 1 or more, got {value!r}")
        elif name in _REQUIRED:
            problems.append(f"{name}: missing in {_CONFIG}")
    if len(problems) > before:
        return None
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    groups = sizes.setdefault("num_key_value_heads", heads)
    if heads % groups:
        problems.append(f"num_key_value_heads: expected a divisor of {heads}, got {groups}")
    if "head_dim" not in sizes and hidden % heads:
        problems.append(f"num_attention_heads: expected a divisor of {hidden}, got {heads}")
    if sizes.setdefault("head_dim", hidden // heads) % 2:
        problems.append(f"head_dim: expected an even number, got {sizes['head_dim']}")
    return None if len(problems) > before else sizes


def _object(data: dict[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    value = data.get(name) or {}
    if isinstance(value, dict):
        return value
    problems.append(f"{name}: expected an object, got {value!r}")
    return {}


def _number(data: dict[str, Any], name: str, default: Any, problems: list[str]) -> Any:
    value = data.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        problems.append(f"{name}: expected a positive number, got {value!r}")
        return default
    return float(value)


def _rotation(data: dict[str, Any], problems: list[str]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling, from the keys of any version of transformers."""
    rope = _object(data, "rope_parameters", problems) or _object(data, "rope_scaling", problems)
    theta = _number(rope | data, "rope_theta", EagleConfig.rope_theta, problems)
    if (rope | data).get("partial_rotary_factor") not in (None, 1):
        problems.append("partial_rotary_factor: a rotation of a part of each head is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # In text all three positions of mrope are the same, which makes it the plain rotation.
    if kind in ("default", "mrope"):
        return theta, None
    if kind not in tuple(_ROTATIONS):
        problems.append(
            f"rope_scaling: expected {' or '.join(_ROTATIONS)} or none, got {kind!r}, "
            "which is not supported"
        )
        return theta, None
    needed = _ROTATIONS[kind]
    if missing := [name for name in needed if rope.get(name) is None]:
        problems.append(f"rope_scaling: {kind} needs {', '.join(missing)}")
    numbers = {name: _number(rope, name, None, problems) for name in needed}
    if None in numbers.values():
        return theta, None
    return theta, {"rope_type": kind, **numbers}


def _aux_layers(data: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    """Target layers whose outputs are the features; None for the default ones."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = _object(data, "eagle_config", problems)
    if nested.get("use_aux_hidden_state") is False:
        problems.append("eagle_config: a head without auxiliary hidden states is not supported")
    listed, first = nested.get(name), 0
    if listed is None:
        # Inputs are counted here: 1 is the output of layer 0.
        listed, first = data.get(name), 1
    if listed is None:
        return None
    if (
        not isinstance(listed, list)
        or not listed
        or any(not isinstance(i, int) or isinstance(i, bool) or i < first for i in listed)
        or len(set(listed)) < len(listed)
    ):
        problems.append(f"{name}: expected distinct layers from {first} on, got {listed!r}")
        return None
    return tuple(i - first for i in listed)


def _draft_table(
    sizes: dict[str, Any], ids: dict[str, Tensor | None], problems: list[str]
) -> tuple[int | None, Tensor | None]:
    """Draft vocabulary: its size and its target ids [Vd]; None, None when it is the target's."""
    vocab, size = sizes["vocab_size"], sizes.get("draft_vocab_size")
    name = "d2t" if ids["d2t"] is not None else "draft_to_target"
    given, marks, table = ids[name], ids["t2d"], None
    if given is None and size not in (None, vocab):
        problems.append(f"missing keys: d2t (draft_vocab_size {size}, vocab_size {vocab})")
        return size, None
    if given is not None:
        if given.ndim != 1 or given.dtype not in _INTEGERS:
            problems.append(
                f"{name}: expected integers [Vd], got {given.dtype} {list(given.shape)}"
            )
            return size, None
        table = given.to(torch.int64)
        if name == "d2t":
            table = table + torch.arange(len(table))
        if size is not None and len(table) != size:
            problems.append(f"{name}: expected {size} ids (draft_vocab_size), got {len(table)}")
        try:
            _checks.vocabulary_map(f"target ids of {name}", table, vocab)
        except ValueError as error:
            problems.append(str(error))
            return size or len(table), None
    if marks is not None:
        if list(marks.shape) != [vocab] or marks.dtype not in (torch.bool, *_INTEGERS):
            problems.append(f"t2d: expected bool [{vocab}], got {marks.dtype} {list(marks.shape)}")
        else:
            expected = torch.full((vocab,), table is None)
            if table is not None:
                expected[table] = True
            if differ := int((marks.bool() != expected).sum()):
                count = vocab if table is None else len(table)
                problems.append(
                    f"t2d: expected the {count} target ids of the draft vocabulary, "
                    f"{differ} marks differ"
                )
    if table is None or (len(table) == vocab and torch.equal(table, torch.arange(vocab))):
        return None, None
    return size or len(table), table


def _some(names: list[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _compare_tensors(
    head: EagleHead, tensors: dict[str, Tensor], known_sizes: bool, problems: list[str]
) -> None:
    expected = {k: list(v.shape) for k, v in head.named_parameters()}
    if unknown := sorted(tensors.keys() - expected.keys()):
        problems.append(f"unknown keys: {_some(unknown)}")
    if missing := sorted(expected.keys() - tensors.keys()):
        problems.append(f"missing keys: {_some(missing)}")
    shared = sorted(expected.keys() & tensors.keys())
    wrong = [
        f"{k} (expected {expected[k]}, got {list(tensors[k].shape)})"
        for k in shared
        if known_sizes and list(tensors[k].shape) != expected[k]
    ]
    if wrong:
        problems.append(f"wrong shapes: {', '.join(wrong)}")
    odd = [f"{k} ({tensors[k].dtype})" for k in shared if tensors[k].dtype not in _FLOATS]
    if odd:
        problems.append(f"wrong dtypes, expected floating point: {', '.join(odd)}")


def _check_surroundings(
    skeleton: EagleHead, embedding: Tensor | None, target: nn.Module | None, problems: list[str]
) -> None:
    """The embedding of the head's own, and the target."""
    config = skeleton.config
    expected = [config.vocab_size, config.hidden_size]
    if embedding is not None:
        if list(embedding.shape) != expected:
            got = list(embedding.shape)
            problems.append(f"wrong shapes: embed_tokens.weight (expected {expected}, got {got})")
        if embedding.dtype not in _FLOATS:
            problems.append(f"wrong dtypes: embed_tokens.weight ({embedding.dtype})")
    elif config.target_hidden_size not in (None, config.hidden_size):
        problems.append(
            f"missing keys: embed_tokens.weight (the target's is {config.target_hidden_size} wide, "
            f"the head {config.hidden_size})"
        )
    if target is not None:
        skeleton.own_embedding = embedding is not None
        problems += [f"target: {problem}" for problem in skeleton.target_problems(target)]
