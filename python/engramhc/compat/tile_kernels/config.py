"""`tile_kernels.config`: numbers that TileKernels is tuned by. None of them changes a bit here."""

from __future__ import annotations

import os

import torch

_DEFAULTS = {"num_sms": 0, "pdl": False, "deterministic": False, "token_alignment": 128}
_values = dict(_DEFAULTS)


def get_device() -> str:
    return "cuda"


def is_ascend() -> bool:
    return False


def get_device_num_sms() -> int:
    """Of the current CUDA device; without one the number of CPU threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return len(os.sched_getaffinity(0))


def get_num_sms() -> int:
    return _values["num_sms"] or get_device_num_sms()


def set_num_sms(num_sms: int) -> None:
    if not 0 < num_sms <= get_device_num_sms():
        raise ValueError(f"set_num_sms: expected 1..{get_device_num_sms()}, got {num_sms}")
    _values["num_sms"] = num_sms


get_num_ai_cores = get_num_cube_cores = get_num_sms


def get_num_vec_cores() -> int:
    return 2 * get_num_sms()


def get_max_smem_per_sm() -> int:
    """Bytes of shared memory of one multiprocessor; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_multiprocessor


def get_pdl() -> bool:
    return _values["pdl"]


def set_pdl(use_pdl: bool) -> None:
    _values["pdl"] = bool(use_pdl)


def get_deterministic_algorithms() -> bool:
    return _values["deterministic"]


def use_deterministic_algorithms(enabled: bool) -> None:
    _values["deterministic"] = bool(enabled)


def get_token_alignment() -> int:
    return _values["token_alignment"]


def set_token_alignment(token_alignment: int) -> None:
    _values["token_alignment"] = token_alignment


def reset_runtime_config() -> None:
    _values.update(_DEFAULTS)
