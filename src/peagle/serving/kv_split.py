"""How engines on one target share the memory for keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch

from peagle.config import EngineConfig

CPU_KV_GIB = 2.0  # KV cache of an engine on a CPU by default


def split_kv(config: EngineConfig, device: torch.device, number: int, count: int) -> EngineConfig:
    """The sizes of engine `number` of `count`, made one after another beside a loaded target.

    What was asked for in blocks or GiB is divided by the engines. On a GPU where neither was
    asked for, each takes its part of what is left when its turn comes.
    """
    if count == 1:
        return config
    if config.num_kv_blocks is not None:
        return replace(config, num_kv_blocks=max(1, config.num_kv_blocks // count))
    if config.kv_cache_gib is not None:
        return replace(config, kv_cache_gib=config.kv_cache_gib / count)
    if device.type != "cuda":
        return replace(config, kv_cache_gib=CPU_KV_GIB / count)
    free, total = torch.cuda.mem_get_info(device)
    used = 1 - free / total
    left = max(config.gpu_memory_utilization - used, 0.0)
    return replace(config, gpu_memory_utilization=used + left / (count - number))
