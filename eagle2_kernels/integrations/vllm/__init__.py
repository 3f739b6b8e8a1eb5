"""vLLM: our tree attention as its attention backend, over its own paged cache.

Installing this package beside vLLM is all it takes: vLLM calls `register` in each of its processes,
through the entry point ``vllm.general_plugins``. On a CPU, where vLLM has one backend for dense
models, ours takes its place; elsewhere ours is the backend ``CUSTOM``, used where asked for::

    LLM(model, attention_config={"backend": "CUSTOM"})

``VLLM_PLUGINS`` chooses plugins (``VLLM_PLUGINS=`` loads none, and vLLM runs as it came).

What goes through our kernel: every batch of a decoder's attention, prefill in chunks, decoding and
the verification of drafts in any mix, each request a causal chain behind its own prefix, with
windows, softcaps and sinks. Long prompts too: on a CPU without AMX vLLM's kernel is no faster there
(512 and 1024 rows of 9 / 3 heads of 64: 13.6 and 55 ms, ours 12.2 and 40). What does not go through
it: encoders, ALiBi and float8 caches, which on a CPU stay with vLLM's kernel and elsewhere are
refused.

Draft trees, which vLLM itself does not have, come with a worker: see
`eagle2_kernels.integrations.vllm.trees`. That is for its CPU worker and V1 model runner; the V2
runner, which vLLM takes on GPUs, refuses the method ``custom_class`` that gives a tree its place in
the scheduler, and none of this has run on a GPU.
"""

from __future__ import annotations

import logging

__all__ = ["register", "unregister"]

_CPU = f"{__name__}.attention.CPUTreeAttentionBackend"
_ANY = f"{__name__}.attention.TreeAttentionBackend"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Make ours the attention backend ``CPU_ATTN`` of vLLM on a CPU, ``CUSTOM`` elsewhere.

    It may be called any number of times. A backend that somebody else put there stays, with a
    warning. Raises ImportError without vLLM.

    Source: ``vllm.v1.attention.backends.registry.register_backend`` of vLLM 0.32.
    """
    from vllm.v1.attention.backends.registry import register_backend

    entry, path = _place()
    if entry.is_overridden() and entry.get_path() != path:
        _logger.warning("eagle2_kernels: %s is already %s; left alone", entry, entry.get_path())
        return
    register_backend(entry, path)
    _forget()


def unregister() -> None:
    """Give vLLM its own backend back, for engines made from now on."""
    entry, path = _place()
    if entry.is_overridden() and entry.get_path() == path:
        entry.clear_override()
        _forget()


def _forget() -> None:
    """Drop the backends that vLLM has chosen so far in this process and would not choose anew."""
    from vllm.v1.attention import selector

    chosen = getattr(selector, "_cached_get_attn_backend", None)
    if chosen is not None:
        chosen.cache_clear()


def _place():  # type: ignore[no-untyped-def]
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        return AttentionBackendEnum.CPU_ATTN, _CPU
    return AttentionBackendEnum.CUSTOM, _ANY
