"""CUDA C++ of the helper kernels and microbenchmarks, as strings for :mod:`simulator.measure.cuda_module`.

Every integer parameter is ``long long`` (the launcher passes Python ints so). Kernels that only read keep their loads
alive by a store that the data never triggers. ``{NAME}`` placeholders are filled by the caller with ``str.replace``.
"""

TIMING_SOURCE = r"""
extern "C" __global__ void iosim_flush_l2(const uint4* data, long long vectors, unsigned* sink) {
  unsigned sum = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  #pragma unroll 4
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += step) {
    uint4 v = data[i]; sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9e3779b9u) sink[0] = sum;
}
extern "C" __global__ void iosim_stamp(long long* out) {
  unsigned sm; long long cycles, nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  out[3 * blockIdx.x] = sm; out[3 * blockIdx.x + 1] = cycles; out[3 * blockIdx.x + 2] = nanoseconds;
}
extern "C" __global__ void iosim_empty() {}
"""

MEMORY_SOURCE = r"""
__device__ __forceinline__ uint4 load_l2(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// reads `vectors` 16-byte words `repeats` times over, grid-stride, past L1
extern "C" __global__ void read_repeat(const uint4* data, long long vectors, long long repeats, unsigned* sink) {
  unsigned sum = 0;
  long long step = (long long)gridDim.x * blockDim.x, first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long r = 0; r < repeats; ++r) {
    long long i = first;
    for (; i + 7 * step < vectors; i += 8 * step) {
      uint4 v[8];
      #pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = load_l2(data + i + u * step);
      #pragma unroll
      for (int u = 0; u < 8; ++u) sum += fold(v[u]);
    }
    for (; i < vectors; i += step) sum += fold(load_l2(data + i));
  }
  if (sum == 0x9e3779b9u) sink[0] = sum;
}
extern "C" __global__ void write_stream(uint4* data, long long vectors, unsigned* sink) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += step)
    data[i] = make_uint4((unsigned)i, 1u, 2u, 3u);
}
// copy where each CTA owns one contiguous chunk, instead of the grid walking the buffer together
extern "C" __global__ void copy_chunked(const uint4* in, uint4* out, long long vectors) {
  long long chunk = (vectors + gridDim.x - 1) / gridDim.x, end = min(vectors, chunk * (blockIdx.x + 1));
  for (long long i = chunk * blockIdx.x + threadIdx.x; i < end; i += 4 * blockDim.x) {
    uint4 v[4];
    #pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) v[u] = load_l2(in + i + u * blockDim.x);
    #pragma unroll
    for (int u = 0; u < 4; ++u) if (i + u * blockDim.x < end) out[i + u * blockDim.x] = v[u];
  }
}
extern "C" __global__ void chase(const long long* next, long long start, long long steps, long long* out) {
  long long p = start, begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin));
  for (long long i = 0; i < steps; ++i)
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(p) : "l"(next + p));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end));
  out[0] = end - begin; out[1] = p;
}
// fp32 additions to L2: every thread adds to its own word, grid-stride, `repeats` times
extern "C" __global__ void atomic_add(float* data, long long words, long long repeats) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long r = 0; r < repeats; ++r)
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step)
      asm volatile("red.global.add.f32 [%0], %1;" :: "l"(data + i), "f"(1.0f) : "memory");
}
// each CTA streams its own region through a ring of `stages` cp.async stages of 16 KiB (256 threads x 4 x 16 B)
extern "C" __global__ void __launch_bounds__(256) stream_cp_async(const uint4* data, long long vectors_per_cta,
                                                                  long long stages, long long repeats) {
  extern __shared__ uint4 ring[];
  const int count = (int)(vectors_per_cta / 1024), total = count * (int)repeats, depth = (int)stages;
  const uint4* base = data + vectors_per_cta * blockIdx.x + threadIdx.x;
  const unsigned shared = (unsigned)__cvta_generic_to_shared(ring) + threadIdx.x * 16;
  int slot = 0, tile = 0;
  for (int t = 0; t < total + depth; ++t) {
    if (t < total) {
      const uint4* from = base + tile * 1024;
      #pragma unroll
      for (int u = 0; u < 4; ++u)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                     "r"(shared + (unsigned)(slot * 16384 + u * 4096)), "l"(from + u * 256));
      if (++slot == depth) slot = 0;
      if (++tile == count) tile = 0;
    }
    asm volatile("cp.async.commit_group;");
    if (depth == 2) asm volatile("cp.async.wait_group 1;");
    else if (depth == 4) asm volatile("cp.async.wait_group 3;");
    else asm volatile("cp.async.wait_group 7;");
  }
}
// the same with the bulk copy engine: one thread keeps `stages` bulk copies of `bytes` in flight
extern "C" __global__ void stream_bulk(const char* data, long long bytes_per_cta, long long bytes, long long stages,
                                       long long repeats) {
  extern __shared__ __align__(128) char space[];
  __shared__ __align__(8) unsigned long long barriers[16];
  if (threadIdx.x != 0) return;
  const unsigned barrier = (unsigned)__cvta_generic_to_shared(barriers), piece = (unsigned)bytes;
  const unsigned shared = (unsigned)__cvta_generic_to_shared(space);
  const int count = (int)(bytes_per_cta / bytes), total = count * (int)repeats, depth = (int)stages;
  for (int s = 0; s < depth; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier + 8 * s));
  asm volatile("fence.proxy.async.shared::cta;");
  const char* base = data + bytes_per_cta * blockIdx.x;
  int slot = 0, tile = 0; unsigned parity = 1;
  for (int t = 0; t < total + depth; ++t) {
    if (t >= depth) {
      unsigned done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier + 8 * slot), "r"(parity) : "memory");
    }
    if (t < total) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier + 8 * slot), "r"(piece));
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                   "r"(shared + slot * piece), "l"(base + (long long)tile * bytes), "r"(piece),
                   "r"(barrier + 8 * slot) : "memory");
      if (++tile == count) tile = 0;
    }
    if (++slot == depth) { slot = 0; parity ^= 1; }
  }
}
"""

MIX_SOURCE = r"""
// a CTA moves one tile of 4 x blockDim words: reads it from {READS} streams and writes it to {WRITES}, `repeats` times
extern "C" __global__ void mix_stream(const uint4* in, uint4* out, long long vectors, long long repeats) {
  for (long long r = 0; r < repeats; ++r) {
    for (long long tile = blockIdx.x; tile * 4 * blockDim.x < vectors; tile += gridDim.x) {
      const long long first = tile * 4 * blockDim.x + threadIdx.x;
      uint4 v[{READS}][4];
      #pragma unroll
      for (int s = 0; s < {READS}; ++s)
        #pragma unroll
        for (int u = 0; u < 4; ++u)
          asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[s][u].x), "=r"(v[s][u].y), "=r"(v[s][u].z),
                       "=r"(v[s][u].w) : "l"(in + s * vectors + first + u * blockDim.x));
      #pragma unroll
      for (int s = 1; s < {READS}; ++s)
        #pragma unroll
        for (int u = 0; u < 4; ++u) v[0][u].x ^= v[s][u].x;
      #pragma unroll
      for (int w = 0; w < {WRITES}; ++w)
        #pragma unroll
        for (int u = 0; u < 4; ++u) out[w * vectors + first + u * blockDim.x] = v[0][u];
    }
  }
}
"""

# One loop body per benchmark; REGISTERS independent chains a thread, ITERATIONS trips, cycles read per CTA.
PIPE_SOURCE = r"""
#define CHAINS 8
extern "C" __global__ void pipe(float* sink, long long* cycles, long long iterations, float seed) {
  float x[CHAINS], y[CHAINS], acc[CHAINS]; unsigned packed = 0;
  #pragma unroll
  for (int i = 0; i < CHAINS; ++i) { x[i] = seed + 0.01f * i + threadIdx.x * 1e-5f; y[i] = x[i] * 0.5f; acc[i] = seed; }
  __shared__ unsigned long long first, last;
  if (threadIdx.x == 0) { first = ~0ull; last = 0; }
  __syncthreads();
  unsigned long long begin, end;  // a warp can be held back before it reads the counter: take the earliest reading
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  for (long long t = 0; t < iterations; ++t) {
    #pragma unroll
    for (int r = 0; r < 4; ++r) {
      {BODY}
    }
  }
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  if (threadIdx.x % 32 == 0) { atomicMin(&first, begin); atomicMax(&last, end); }
  __syncthreads();
  float sum = __uint_as_float(packed);
  #pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += x[i] + y[i] + acc[i];
  if (sum == 1.2345e30f) sink[0] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = (long long)(last - first);
}
"""

_EACH = '_Pragma("unroll") for (int i = 0; i < CHAINS; ++i) { '
EX2 = 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])); '
FMA = 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(acc[i]) : "f"(y[i]), "f"(seed)); '
ADD = 'asm volatile("add.f32 %0, %0, %1;" : "+f"(acc[i]) : "f"(y[i])); '
MUL = 'asm volatile("mul.f32 %0, %0, %1;" : "+f"(acc[i]) : "f"(seed)); '
MAX = 'asm volatile("max.f32 %0, %0, %1;" : "+f"(y[i]) : "f"(x[(i + 1) % CHAINS])); '
SELECT = (
    'asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, %2; selp.f32 %0, %0, 0fFF800000, p; }" '
    ': "+f"(y[i]) : "r"((int)t + i), "r"((int)threadIdx.x)); '
)
CONVERT = (
    'if (i % 2 == 0) { unsigned v; asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x[i]), "f"(x[i + 1])); '
    "packed ^= v; } "
)
CONVERT_ONLY = (
    'if (i % 2 == 0) { unsigned v; asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x[i]), "f"(acc[i])); '
    "x[i] = __uint_as_float(v); } "
)
SHUFFLE = 'asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;" : "+f"(x[i])); '


def each(*operations: str) -> str:
    """A loop body that applies each operation to the eight chains in turn (so that a chain never waits for itself)."""
    return " ".join(_EACH + operation + "}" for operation in operations)


# name -> (body, elements per thread and trip: 4 rounds x 8 chains)
PIPE_BODIES = {
    "ex2": each(EX2),
    "ffma": each(FMA),
    "fadd": each(ADD),
    "fmul": each(MUL),
    "fmax": each(MAX),
    "select": each(SELECT),
    "convert_bf16x2": each(CONVERT_ONLY),
    "shuffle": each(SHUFFLE),
    "ex2_1ffma": each(EX2, FMA),
    "ex2_2ffma": each(EX2, FMA, FMA),
    "ex2_4ffma": each(EX2, FMA, FMA, FMA, FMA),
    "ex2_6ffma": each(EX2, *[FMA] * 6),
    "ex2_8ffma": each(EX2, *[FMA] * 8),
    "ex2_12ffma": each(EX2, *[FMA] * 12),
    "ffma_fmax": each(FMA, MAX),
    "ffma_2fmax": each(FMA, MAX, MAX),
    "ex2_4fmax": each(EX2, *[MAX] * 4),
    "ex2_convert": each(EX2, CONVERT),
    "softmax_like": each(MAX, FMA, EX2, ADD, CONVERT),
    "softmax_masked": each(SELECT, MAX, FMA, EX2, ADD, CONVERT),
}

SHARED_SOURCE = r"""
extern "C" __global__ void shared_read(float* sink, long long* cycles, long long iterations, long long stride) {
  extern __shared__ uint4 space[];
  for (int i = threadIdx.x; i < 8192 / 4; i += blockDim.x) space[i] = make_uint4(i, i, i, i);
  __syncthreads();
  unsigned base = (unsigned)__cvta_generic_to_shared(space) + (unsigned)((threadIdx.x * 16) % 16384);
  unsigned sum = 0; long long begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  for (long long t = 0; t < iterations; ++t) {
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      uint4 v;
      asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                            : "r"((base ^ (unsigned)((t & 3) << 11)) + u * 2048));
      sum += v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  __syncthreads();
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  if (sum == 0x9e3779b9u) sink[0] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
extern "C" __global__ void shared_ldmatrix(float* sink, long long* cycles, long long iterations, long long stride) {
  extern __shared__ uint4 space[];
  for (int i = threadIdx.x; i < 8192 / 4; i += blockDim.x) space[i] = make_uint4(i, i, i, i);
  __syncthreads();
  unsigned base = (unsigned)__cvta_generic_to_shared(space) + (unsigned)((threadIdx.x * 16) % 16384);
  unsigned sum = 0; long long begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  for (long long t = 0; t < iterations; ++t) {
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      uint4 v; asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                            : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                            : "r"((base ^ (unsigned)((t & 3) << 11)) + u * 2048));
      sum += v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  __syncthreads();
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  if (sum == 0x9e3779b9u) sink[0] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
extern "C" __global__ void barrier(float* sink, long long* cycles, long long iterations, long long unused) {
  long long begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  for (long long t = 0; t < iterations; ++t) {
    #pragma unroll
    for (int u = 0; u < 8; ++u) __syncthreads();
  }
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
"""

# mma.sync m16n8k16 from registers; the first {MMA_WARPS} warps of a CTA multiply, the others run exponentials.
MMA_SOURCE = r"""
extern "C" __global__ void mma(float* sink, long long* cycles, long long iterations, float seed) {
  float c[8][4]; unsigned a[4], b[2]; float x[8];
  #pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = 0x3c003c00u ^ (threadIdx.x * 2654435761u & 0x03ff03ffu);
  b[0] = a[1] ^ 0x00550055u; b[1] = a[2] ^ 0x01230123u;
  #pragma unroll
  for (int i = 0; i < 8; ++i) { x[i] = seed * i; for (int j = 0; j < 4; ++j) c[i][j] = seed; }
  const bool multiplies = threadIdx.x / 32 < {MMA_WARPS};
  __syncthreads();
  long long begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  if (multiplies) {
    for (long long t = 0; t < iterations; ++t) {
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        {INNER}
      }
    }
  } else {
    for (long long t = 0; t < iterations * {EXP_RATIO}; ++t) {
      #pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    }
  }
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 8; ++i) { sum += x[i]; for (int j = 0; j < 4; ++j) sum += c[i][j]; }
  if (sum == 1.2345e30f) sink[0] = sum;
  if (threadIdx.x % 32 == 0) cycles[blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32] = end - begin;
}
"""

# wgmma m64nNk16, A and B from shared memory (no swizzle; the contents do not matter here); one or two warpgroups.
WGMMA_SOURCE = r"""
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | (1ull << 16) | (8ull << 32);
}
extern "C" __global__ void __launch_bounds__(384, 1) wgmma(float* sink, long long* cycles, long long iterations,
                                                           float seed) {
  extern __shared__ __align__(1024) unsigned short tile[];
  for (int i = threadIdx.x; i < 65536 / 2; i += blockDim.x) tile[i] = 0x3c00 ^ ((i * 40503u) & 0x83ff);
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  float c[{N} / 2];
  #pragma unroll
  for (int i = 0; i < {N} / 2; ++i) c[i] = seed;
  unsigned base = (unsigned)__cvta_generic_to_shared(tile);
  unsigned long long da = descriptor(base), db = descriptor(base + 16384);
  long long begin, end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin) :: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (long long t = 0; t < iterations; ++t) {
    #pragma unroll
    for (int u = 0; u < 8; ++u)
      asm volatile("wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {{REGISTERS}}, %{A}, %{B}, 1, 1, 1, 0, 0;"
                   : {OUTPUTS} : "l"(da + u), "l"(db + u));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end) :: "memory");
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < {N} / 2; ++i) sum += c[i];
  if (sum == 1.2345e30f) sink[0] = sum;
  if (threadIdx.x % 128 == 0) cycles[blockIdx.x * (blockDim.x / 128) + threadIdx.x / 128] = end - begin;
}
"""


def mma_source(mma_warps: int, exp_ratio: int = 1, inner_exponentials: int = 0) -> str:
    """``mma.sync`` kernel: ``mma_warps`` warps multiply, the rest exponentiate ``exp_ratio`` × 8 per trip.

    ``inner_exponentials`` adds that many exponentials behind each multiplication in the same warp.
    """
    inner = 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])); ' * inner_exponentials
    text = MMA_SOURCE.replace("{MMA_WARPS}", str(mma_warps)).replace("{EXP_RATIO}", str(exp_ratio))
    return text.replace("{INNER}", inner)


def wgmma_source(columns: int) -> str:
    """``wgmma`` kernel of shape m64 × n``columns`` × k16, both operands from shared memory."""
    count = columns // 2
    registers = "{" + ",".join(f"%{index}" for index in range(count)) + "}"
    outputs = ", ".join(f'"+f"(c[{index}])' for index in range(count))
    text = WGMMA_SOURCE.replace("{{REGISTERS}}", registers).replace("{OUTPUTS}", outputs)
    text = text.replace("%{A}", f"%{count}").replace("%{B}", f"%{count + 1}")
    return text.replace("{N}", str(columns))


def mix_source(reads: int, writes: int) -> str:
    """Streaming kernel that reads ``reads`` arrays and writes ``writes``."""
    return MIX_SOURCE.replace("{READS}", str(reads)).replace("{WRITES}", str(writes))


def pipe_source(name: str) -> str:
    """Source of the pipe benchmark ``name`` (a key of :data:`PIPE_BODIES`)."""
    return PIPE_SOURCE.replace("{BODY}", PIPE_BODIES[name])
