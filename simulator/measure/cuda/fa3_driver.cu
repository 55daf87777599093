// Launches a forward kernel of FlashAttention-3's first releases on device pointers as their flash_api.cpp does: Q, K, V
// and O as (batch, seqlen, heads, head_dim), contiguous. It is compiled together with one release's sources, which are
// not part of iosim:
//   repository Dao-AILab/flash-attention, hopper/flash_fwd_hdim{64,128,256}_{fp16,e4m3}_sm90.cu, at
//     7f67966c (2024-07-11, the day of the paper: fp16; NVIDIA/cutlass at fa4f6359),
//     74b0761f (2024-07-14: bf16, causal tiles handed out dynamically; cutlass at 756c351b) or
//     5018ac6a (2024-07-30: e4m3, V transposed in the kernel; cutlass at 756c351b; the paper's e4m3 kernel is not
//     persistent: for flash_attn_3_2024_grid, Scheduler is SingleTileScheduler in its flash_fwd_launch_template.h).
// Headers of PyTorch that those sources include are needed only for types and error checks: ATen/cuda/CUDAContext.h
// (C10_CUDA_CHECK), CUDAGeneratorImpl.h and CUDAGraphsUtils.cuh (PhiloxCudaState); give stand-ins of a few lines.
//   nvcc <the flags of hopper/setup.py> -I<stand-ins> -I<hopper> -I<cutlass>/include -DFA3_E4M3=0|1
//        -DFA3_CALL_64=1|0 -DFA3_CALL_128=1|0 -DFA3_CALL_256=1|0 -shared fa3_driver.cu <hopper>/flash_fwd_*.cu -lcuda
//        -o libfa3.so
// hopper/setup.py asked for CUDA 12.3. nvcc 13.0 builds them too; what was measured here was assembled with 12.3's ptxas,
// which takes nvcc 13.0's PTX once its version line says 8.3.
#include <cmath>
#include <cstdint>
#include <cstring>

#include <cutlass/numeric_types.h>

#include "flash.h"

#if FA3_E4M3
using element = cutlass::float_e4m3_t;
#else
using element = cutlass::half_t;
#endif

// 0, or 1 where the library holds no kernel of that head dim.
extern "C" int fa3_fwd(void *q, void *k, void *v, void *out, void *lse, int *tile_counter, int batch, int seqlen,
                       int heads, int head_dim, float scale, int causal, void *stream) {
    static Flash_fwd_params p;
    memset(static_cast<void *>(&p), 0, sizeof(p));
    const int64_t row = int64_t(heads) * head_dim;
    p.q_ptr = q;
    p.k_ptr = k;
    p.v_ptr = v;
    p.o_ptr = out;
    p.softmax_lse_ptr = lse;
    p.tile_count_semaphore = tile_counter;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = row;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = head_dim;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = row * seqlen;
    p.b = batch;
    p.h = p.h_k = heads;
    p.h_h_k_ratio = 1;
    p.d = p.d_rounded = head_dim;
    p.seqlen_q = p.seqlen_k = seqlen;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (seqlen + 127) / 128 * 128;
    p.scale_softmax = scale;
    p.scale_softmax_log2 = scale * static_cast<float>(M_LOG2E);
    p.is_causal = causal;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (head_dim) {
#if FA3_CALL_64
    case 64: run_mha_fwd_<element, 64>(p, on); return 0;
#endif
#if FA3_CALL_128
    case 128: run_mha_fwd_<element, 128>(p, on); return 0;
#endif
#if FA3_CALL_256
    case 256: run_mha_fwd_<element, 256>(p, on); return 0;
#endif
    default: return 1;
    }
}
