"""Adapters to other engines, one file each, imported only on request.

``from eagle2_kernels.integrations import sglang`` and so on. An adapter holds no algorithm of its
own: it maps an engine's arguments to operators of this library and their results back. None needs
its engine to be installed until something of the engine's is asked for.
"""
