"""What the public kernels do, as data: one import for the tables of every algorithm.

A function answers for one kernel instantiation. Whether a GPU can run it is the caller's question: ``smem_bytes``
against the profile, ``instruction_path`` against its capabilities.
"""

from algorithms.kernels_backward import (
    BackwardTile,
    HelperKernel,
    backward_row_blocks,
    fa2_backward_tile,
    fa3_backward_tile,
)
from algorithms.kernels_common import (
    FLASH_ATTENTION_SNAPSHOT,
    CombineKernel,
    ctas_per_sm,
    element_bytes,
    round_head_dim,
)
from algorithms.kernels_fa1 import (
    Fa1PaperBlocks,
    Fa1Tile,
    fa1_first_row_step,
    fa1_forward_tile,
    fa1_num_splits,
    fa1_paper_blocks,
)
from algorithms.kernels_fa2 import Fa2Tile, fa2_combine_kernel, fa2_forward_tile, fa2_splitkv_tile
from algorithms.kernels_fa3 import Fa3Tile, fa3_combine_kernel, fa3_forward_tile, fa3_padded_head_dims
from algorithms.kernels_gemm import GemmKernel, gemm_kernel
from algorithms.kernels_softmax import (
    ElementwiseKernel,
    RowKernel,
    concatenation_kernel,
    contiguous_elementwise_kernel,
    mask_add_kernel,
    softmax_backward_kernel,
    softmax_forward_kernel,
    strided_copy_kernel,
)

__all__ = [
    "FLASH_ATTENTION_SNAPSHOT",
    "BackwardTile",
    "CombineKernel",
    "ElementwiseKernel",
    "Fa1PaperBlocks",
    "Fa1Tile",
    "Fa2Tile",
    "Fa3Tile",
    "GemmKernel",
    "HelperKernel",
    "RowKernel",
    "backward_row_blocks",
    "concatenation_kernel",
    "contiguous_elementwise_kernel",
    "ctas_per_sm",
    "element_bytes",
    "fa1_first_row_step",
    "fa1_forward_tile",
    "fa1_num_splits",
    "fa1_paper_blocks",
    "fa2_backward_tile",
    "fa2_combine_kernel",
    "fa2_forward_tile",
    "fa2_splitkv_tile",
    "fa3_backward_tile",
    "fa3_combine_kernel",
    "fa3_forward_tile",
    "fa3_padded_head_dims",
    "gemm_kernel",
    "mask_add_kernel",
    "round_head_dim",
    "softmax_backward_kernel",
    "softmax_forward_kernel",
    "strided_copy_kernel",
]
