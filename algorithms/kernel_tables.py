"""What the public kernels do, as data: one import for the tables of every algorithm.

A function answers for one kernel instantiation. Whether a GPU can run it is the caller's question: ``smem_bytes``
against the profile, ``instruction_path`` against its capabilities.
"""

from algorithms.kernels_common import (
    FLASH_ATTENTION_SNAPSHOT,
    CombineKernel,
    ctas_per_sm,
    element_bytes,
    round_head_dim,
)
from algorithms.kernels_fa2 import Fa2Tile, fa2_combine_kernel, fa2_forward_tile, fa2_splitkv_tile
from algorithms.kernels_fa3 import Fa3Tile, fa3_combine_kernel, fa3_forward_tile, fa3_padded_head_dims

__all__ = [
    "FLASH_ATTENTION_SNAPSHOT",
    "CombineKernel",
    "Fa2Tile",
    "Fa3Tile",
    "ctas_per_sm",
    "element_bytes",
    "fa2_combine_kernel",
    "fa2_forward_tile",
    "fa2_splitkv_tile",
    "fa3_combine_kernel",
    "fa3_forward_tile",
    "fa3_padded_head_dims",
    "round_head_dim",
]
