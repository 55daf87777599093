// Run 1 of micro_read_sharing.csv: pairs of SMs, delays within a TPC, all SMs at once.
// nvcc -O3 -arch=sm_90a read_sharing_all.cu; ncu --clock-control none --csv --page raw --metrics lts__t_sectors_srcunit_tex_op_read.sum ./a.out
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <string>
#include <random>
__global__ void stream(const uint4* data, const int* rank_of, const int* delay_of, const int* chunk_of, int n_part,
                       unsigned* bar, int chunks, long chunk_vec, uint4* sink) {
  extern __shared__ char pad[];
  unsigned smid; asm("mov.u32 %0,%%smid;" : "=r"(smid));
  int rank = rank_of[smid];
  if (rank < 0) return;
  uint4 acc = {0,0,0,0};
  const uint4* base = data + (long)chunk_of[smid] * chunk_vec * chunks;
  for (int c = 0; c < chunks; ++c) {
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(bar, 1u);
      while (*(volatile unsigned*)bar < (unsigned)(n_part * (c + 1))) {}
      long long t = clock64(); while (clock64() - t < delay_of[smid]) {}
    }
    __syncthreads();
    const uint4* p = base + c * chunk_vec;
    #pragma unroll 8
    for (long i = threadIdx.x; i < chunk_vec; i += blockDim.x) {
      uint4 v; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x),"=r"(v.y),"=r"(v.z),"=r"(v.w) : "l"(p + i));
      acc.x ^= v.x; acc.y ^= v.y; acc.z ^= v.z; acc.w ^= v.w;
    }
  }
  if (acc.x == 0x12345 && acc.y == 7) sink[smid] = acc;
}
int main() {
  int sms = 132; long chunk = 32768; int chunks = 64; long vec = chunk / 16;
  uint4* data; cudaMalloc(&data, chunk * chunks * 16); cudaMemset(data, 1, chunk * chunks * 16);
  int *r, *d, *k; unsigned* bar; uint4* sink;
  cudaMalloc(&r, sms * 4); cudaMalloc(&d, sms * 4); cudaMalloc(&k, sms * 4); cudaMalloc(&bar, 4); cudaMalloc(&sink, sms * 16);
  cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  std::mt19937 rng(1); int n = 0;
  auto go = [&](std::string what, std::vector<int> who, std::vector<int> delay, std::vector<int> group) {
    std::vector<int> R(sms, -1), D(sms, 0), K(sms, 0);
    for (size_t i = 0; i < who.size(); ++i) { R[who[i]] = i; D[who[i]] = delay[i]; K[who[i]] = group[i]; }
    cudaMemcpy(r, R.data(), sms * 4, cudaMemcpyHostToDevice); cudaMemcpy(d, D.data(), sms * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(k, K.data(), sms * 4, cudaMemcpyHostToDevice); cudaMemset(bar, 0, 4);
    stream<<<sms, 256, 200 * 1024>>>(data, r, d, k, who.size(), bar, chunks, vec, sink);
    cudaError_t e = cudaDeviceSynchronize();
    printf("case %d,%s,%zu,%ld,%s\n", n++, what.c_str(), who.size(), (long)who.size() * chunk * chunks / 32, cudaGetErrorString(e));
  };
  for (int b : {1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 18, 20, 24, 32, 34, 36, 48, 50, 64, 66, 80, 100, 116, 131}) go("pair b=" + std::to_string(b), {0, b}, {0, 0}, {0, 0});
  for (int dl : {25, 50, 100, 200, 300, 400, 600, 800, 1200, 2400}) { go("tpc delay=" + std::to_string(dl), {0, 1}, {0, dl}, {0, 0}); go("pair2 delay=" + std::to_string(dl), {0, 2}, {0, dl}, {0, 0}); }
  for (int spread : {0, 100, 200, 400, 800, 1600, 3200}) for (int groups : {1, 4, 8, 16}) {
    std::vector<int> who, de, gr;
    for (int i = 0; i < sms; ++i) { who.push_back(i); de.push_back(spread ? (int)(rng() % spread) : 0); gr.push_back(i * groups / sms); }
    go("all spread=" + std::to_string(spread) + " groups=" + std::to_string(groups), who, de, gr);
  }
  for (int spread : {0, 400, 1600}) for (int groups : {4, 16}) {
    std::vector<int> who, de, gr;
    for (int i = 0; i < sms; ++i) { who.push_back(i); de.push_back(spread ? (int)(rng() % spread) : 0); gr.push_back(i % groups); }
    go("all interleaved spread=" + std::to_string(spread) + " groups=" + std::to_string(groups), who, de, gr);
  }
  return 0;
}
