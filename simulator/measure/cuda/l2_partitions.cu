// What ran for hardware_profiles/measurements/h200_sxm/micro_l2_partitions.csv, under ncu, launched from Python:
// probe_side measures each SM's latency to some lines, which tells the two halves of the L2 apart (9 of 10 SMs rightly);
// probe_read reads a buffer `repeats` times, each line by one SM of every group (group_of[sm], -1: idle);
// probe_async reads it once with cp.async; probe_write writes it.
__device__ __forceinline__ unsigned ld(const uint4* p) {
  uint4 v; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v.x ^ v.y ^ v.z ^ v.w;
}
extern "C" __global__ void probe_side(const uint4* data, int lines, long long stride, int* out) {
  unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (threadIdx.x) return;
  out[sm * (lines + 1)] = sm + 1;
  for (int l = 0; l < lines; ++l) {
    const uint4* p = data + l * stride; unsigned s = 0; long long b, e;
    s += ld(p);
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(b));
    for (int i = 0; i < 64; ++i) s += ld(p + (s == 0x12345u));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(e));
    out[sm * (lines + 1) + 1 + l] = (int)((e - b) / 64) + (s == 77u);
  }
}
extern "C" __global__ void __launch_bounds__(512) probe_read(const uint4* data, long long vectors, long long repeats, const int* group_of, long long groups, unsigned* sink) {
  unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  long long g = group_of[sm]; if (g < 0) return;
  unsigned s = 0; long long step = groups * 512 * 4;
  for (long long r = 0; r < repeats; ++r)
    for (long long i = g * 2048 + threadIdx.x; i < vectors; i += step) {
      #pragma unroll
      for (int u = 0; u < 4; ++u) if (i + u * 512 < vectors) s += ld(data + i + u * 512);
    }
  if (s == 0x9e3779b9u) sink[0] = s;
}
extern "C" __global__ void __launch_bounds__(512) probe_async(const uint4* data, long long vectors, unsigned* sink) {
  extern __shared__ uint4 ring[];
  unsigned at = (unsigned)__cvta_generic_to_shared(ring) + threadIdx.x * 16;
  for (long long i = (long long)blockIdx.x * 2048 + threadIdx.x; i < vectors; i += gridDim.x * 2048LL) {
    for (int u = 0; u < 4; ++u) if (i + u * 512 < vectors)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at + u * 8192), "l"(data + i + u * 512));
    asm volatile("cp.async.commit_group;"); asm volatile("cp.async.wait_group 1;");
  }
}
extern "C" __global__ void __launch_bounds__(512) probe_write(uint4* data, long long vectors) {
  for (long long i = (long long)blockIdx.x * 512 + threadIdx.x; i < vectors; i += gridDim.x * 512LL)
    data[i] = make_uint4((unsigned)i, 1u, 2u, 3u);
}
