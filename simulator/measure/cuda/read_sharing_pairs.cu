// Run 2 of micro_read_sharing.csv: where CTAs land, which SMs share, how many, and how long a line stays.
// The kernel is that of read_sharing_all.cu with a second stream beside it, fewer loads in flight and a wait that sleeps;
// each file stays as it was measured, so they share no header.
// nvcc and ncu as in read_sharing_all.cu, with --cache-control none -k regex:stream; the lines "where" come without ncu.
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <string>
#include <random>
__global__ void where(int* smid_of, int spin) {
  unsigned s; asm("mov.u32 %0,%%smid;" : "=r"(s)); if (threadIdx.x == 0) smid_of[blockIdx.x] = s;
  long long t = clock64(); while (clock64() - t < spin) {}
}
__global__ void stream(const uint4* data, const int* rank_of, const int* delay_of, const int* chunk_of, int n_part,
                       unsigned* bar, int chunks, long chunk_vec, uint4* sink, const uint4* other, long other_vec) {
  unsigned smid; asm("mov.u32 %0,%%smid;" : "=r"(smid));
  int rank = rank_of[smid];
  if (rank < 0) return;
  uint4 acc = {0,0,0,0};
  const uint4* base = data + (long)chunk_of[smid] * chunk_vec * chunks;
  for (int c = 0; c < chunks; ++c) {
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(bar, 1u);
      while (*(volatile unsigned*)bar < (unsigned)(n_part * (c + 1))) __nanosleep(200);
      long long t = clock64(); while (clock64() - t < delay_of[smid]) {}
    }
    __syncthreads();
    const uint4* p = base + c * chunk_vec;
    #pragma unroll 4
    for (long i = threadIdx.x; i < chunk_vec; i += blockDim.x) {
      uint4 v; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x),"=r"(v.y),"=r"(v.z),"=r"(v.w) : "l"(p + i));
      acc.x ^= v.x; acc.y ^= v.y; acc.z ^= v.z; acc.w ^= v.w;
    }
    if (delay_of[smid] == 0) for (long i = threadIdx.x; i < other_vec; i += blockDim.x) {  // the leader goes on reading
      uint4 v; asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x),"=r"(v.y),"=r"(v.z),"=r"(v.w) : "l"(other + c * other_vec + i));
      acc.x ^= v.x; acc.y ^= v.y;
    }
  }
  if (acc.x == 0x12345 && acc.y == 7) sink[smid] = acc;
}
int sms = 132, n = 0; uint4 *data, *sink, *other; int *r, *d, *k; unsigned* bar;
void go(const char* what, int param, std::vector<int> who, std::vector<int> delay, std::vector<int> group, long chunk, int chunks, long other_bytes = 0) {
  std::vector<int> R(sms, -1), D(sms, 0), K(sms, 0); int leaders = 0;
  for (size_t i = 0; i < who.size(); ++i) { R[who[i]] = i; D[who[i]] = delay[i]; K[who[i]] = group[i]; leaders += delay[i] == 0; }
  cudaMemcpy(r, R.data(), sms * 4, cudaMemcpyHostToDevice); cudaMemcpy(d, D.data(), sms * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(k, K.data(), sms * 4, cudaMemcpyHostToDevice); cudaMemset(bar, 0, 4);
  stream<<<sms, 256, 200 * 1024>>>(data, r, d, k, who.size(), bar, chunks, chunk / 16, sink, other, other_bytes / 16);
  cudaError_t e = cudaDeviceSynchronize();
  printf("case,%d,%s,%d,%zu,%ld,%ld,%s\n", n++, what, param, who.size(), (long)who.size() * chunk * chunks / 32, leaders * other_bytes * chunks / 32, cudaGetErrorString(e));
}
int main() {
  cudaMalloc(&data, 64l << 20); cudaMemset(data, 1, 64l << 20); cudaMalloc(&other, 64l << 20); cudaMemset(other, 1, 64l << 20);
  cudaMalloc(&r, 528); cudaMalloc(&d, 528); cudaMalloc(&k, 528); cudaMalloc(&bar, 4); cudaMalloc(&sink, sms * 16);
  cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  cudaFuncSetAttribute(where, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  int* w; cudaMalloc(&w, 4096 * 4); std::vector<int> h(528);
  for (int per : {1, 2}) { where<<<132 * per, 128, per == 1 ? 200 * 1024 : 100 * 1024>>>(w, 20000); cudaDeviceSynchronize();
    cudaMemcpy(h.data(), w, 132 * per * 4, cudaMemcpyDeviceToHost); printf("where%d", per); for (int i = 0; i < 132 * per; ++i) printf(",%d", h[i]); printf("\n"); }
  for (int a : {0, 2, 4, 6, 8, 10, 12, 14}) for (int b = 0; b < 132; b += 2) if (a != b) go("map", a * 1000 + b, {a, b}, {0, 0}, {0, 0}, 8192, 16);
  for (int m : {2, 3, 4, 6, 8}) { std::vector<int> who; for (int i = 0; i < m; ++i) who.push_back((i / 2) * 16 + i % 2); go("many", m, who, std::vector<int>(m, 0), std::vector<int>(m, 0), 32768, 32); }
  for (int m : {2, 4, 6, 8}) { std::vector<int> who, de; for (int i = 0; i < m; ++i) { who.push_back((i / 2) * 16 + i % 2); de.push_back(i * 400); } go("staggered400", m, who, de, std::vector<int>(m, 0), 32768, 32); }
  for (int dl : {300, 600, 1200, 2400, 4800, 9600}) for (long o : {0l, 32768l, 131072l}) go(("stay" + std::to_string(o)).c_str(), dl, {0, 16}, {0, dl}, {0, 0}, 32768, 32, o);
  for (int dl : {600, 2400, 9600}) for (long c : {4096l, 8192l, 16384l, 65536l, 131072l}) go(("size" + std::to_string(c)).c_str(), dl, {0, 16}, {0, dl}, {0, 0}, c, 32);
  return 0;
}
