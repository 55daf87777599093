// Launches the kernels of flash-attn 1.0.9 on device pointers as its fmha_api.cpp does: fp16, QKV packed as (tokens, 3,
// heads, head_dim), no dropout. It is compiled together with that release's sources, which are not part of iosim:
//   repository Dao-AILab/flash-attention, commit 6d48e14a (the last before version 2), csrc/flash_attn/src/
//   fmha_{fwd,bwd}_hdim{64,128}.cu; NVIDIA/cutlass at 319a389f (the submodule's commit).
// Three headers of PyTorch that those sources include are needed only for types: ATen/cuda/CUDAContext.h
// (getCurrentDeviceProperties), CUDAGeneratorImpl.h (PhiloxCudaState) and detail/UnpackRaw.cuh (philox::unpack); give
// stand-ins of a few lines or PyTorch's own. Dropout, bf16 and the returned softmax may be switched off in static_switch.h.
//   nvcc -O3 -std=c++17 -arch=sm_90 -Xcompiler -fPIC --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math
//        -I<stand-ins> -I<src> -I<cutlass>/include -shared fa1_driver.cu <src>/fmha_*_hdim64.cu <src>/fmha_*_hdim128.cu
//        -o libfa1.so
#include <cstdint>
#include <cstring>

#include "fmha.h"

static void set_forward(FMHA_fprop_params &p, void *q, void *k, void *v, void *out, void *tmp, void *lse, void *lengths,
                        int batch, int seqlen, int heads, int head_dim, float scale, int causal, void *rng) {
    const uint32_t row = heads * head_dim;
    const int block = head_dim > 64 ? 128 : 256;
    p.q_ptr = q;
    p.k_ptr = k;
    p.v_ptr = v;
    p.o_ptr = out;
    p.o_tmp_ptr = tmp;
    p.softmax_lse_ptr = lse;
    p.q_row_stride_in_elts = p.k_row_stride_in_elts = p.v_row_stride_in_elts = 3 * row;
    p.q_head_stride_in_elts = p.k_head_stride_in_elts = p.v_head_stride_in_elts = head_dim;
    p.o_row_stride_in_elts = p.o_tmp_row_stride_in_elts = row;
    p.o_head_stride_in_elts = p.o_tmp_head_stride_in_elts = head_dim;
    p.b = batch;
    p.h = heads;
    p.d = head_dim;
    p.seqlen_q = (seqlen + 15) / 16 * 16;
    p.seqlen_k = seqlen <= 128 ? 128 : (seqlen + block - 1) / block * block;
    p.cu_seqlens_q = p.cu_seqlens_k = static_cast<int *>(lengths);
    p.scale_bmm1f = p.scale_bmm1_rp_dropout = scale;
    p.p_dropout = p.rp_dropout = 1.f;
    p.is_causal = causal;
    p.rng_state = static_cast<uint64_t *>(rng);
}

extern "C" int fa1_fwd(void *q, void *k, void *v, void *out, void *tmp, void *lse, void *lengths, int batch, int seqlen,
                       int heads, int head_dim, float scale, int causal, void *rng, void *stream) {
    Launch_params<FMHA_fprop_params> launch(at::cuda::getCurrentDeviceProperties(), static_cast<cudaStream_t>(stream),
                                            false, false);
    memset(static_cast<void *>(&launch.params), 0, sizeof(launch.params));
    set_forward(launch.params, q, k, v, out, tmp, lse, lengths, batch, seqlen, heads, head_dim, scale, causal, rng);
    head_dim <= 64 ? run_fmha_fwd_hdim64(launch) : run_fmha_fwd_hdim128(launch);
    return launch.params.num_splits;
}

// With ``configure`` nothing is launched: the splits that the package would choose are returned (over 1: dQ's
// accumulator must be zeroed before the launch and copied to dQ after it).
extern "C" int fa1_bwd(void *q, void *k, void *v, void *out, void *d_out, void *dq, void *dk, void *dv, void *tmp,
                       void *lse, void *d_sum, void *lengths, int batch, int seqlen, int heads, int head_dim,
                       float scale, int causal, void *rng, void *stream, int configure, int splits) {
    FMHA_dgrad_params p;
    memset(static_cast<void *>(&p), 0, sizeof(p));
    set_forward(p, q, k, v, out, tmp, lse, lengths, batch, seqlen, heads, head_dim, scale, causal, rng);
    const uint32_t row = heads * head_dim;
    p.dq_ptr = dq;
    p.dk_ptr = dk;
    p.dv_ptr = dv;
    p.do_ptr = d_out;
    p.dsoftmax_sum = d_sum;
    p.dq_row_stride_in_elts = p.dk_row_stride_in_elts = p.dv_row_stride_in_elts = 3 * row;
    p.dq_head_stride_in_elts = p.dk_head_stride_in_elts = p.dv_head_stride_in_elts = head_dim;
    p.num_splits = splits;
    const auto on = static_cast<cudaStream_t>(stream);
    head_dim <= 64 ? run_fmha_bwd_hdim64(p, on, configure) : run_fmha_bwd_hdim128(p, on, configure);
    return p.num_splits;
}
