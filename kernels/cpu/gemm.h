// Blocked matrix product x[M,K] . w[N,K]^T for many rows (prefill). Blocks of both sides are packed into the format of
// the dot product instruction, zero padded, so the inner tile has no tails and any source dtype costs one conversion.
#pragma once
#include "abi.h"
#include "int8.h"

namespace porter {

// A Dot names the packed element types, the tile (MR rows by NR columns, which fill the register file) and its product.
struct FloatDot {
  using X = float;
  using W = float;
  using Sum = float;
  static constexpr int step = Vec::width, MR = Vec::width == 16 ? 6 : 4, NR = Vec::width == 16 ? 4 : 3;
  template <typename T>
  static void pack_x(X* out, const T* x, int64_t size, int64_t room) { pack(out, x, size, room); }
  template <typename T>
  static Sum pack_w(W* out, const T* w, int64_t size, int64_t room) {
    pack(out, w, size, room);
    return 0;
  }
  template <typename T>
  static void pack(float* out, const T* x, int64_t size, int64_t room) {
    for_each_vector(size, [&](int64_t i, int n) { store(out + i, load_count(x + i, n)); });
    for (int64_t i = round_up(size, step); i < room; ++i) out[i] = 0;
  }
  static void tile(const X* x, const W* w, int64_t size, Sum* out) {
    Vec acc[MR][NR];
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NR; ++n) acc[m][n] = zero();
    for (int64_t i = 0; i < size; i += step) {
      Vec weight[NR];
      for (int n = 0; n < NR; ++n) weight[n] = load(w + n * size + i);
      for (int m = 0; m < MR; ++m) {
        Vec value = load(x + m * size + i);
        for (int n = 0; n < NR; ++n) acc[m][n] = fma(value, weight[n], acc[m][n]);
      }
    }
    for (int m = 0; m < MR; ++m) {
      float four[4];
      sum4(four, acc[m][0], acc[m][1], acc[m][2], NR == 4 ? acc[m][NR - 1] : zero());
      for (int n = 0; n < NR; ++n) out[m * NR + n] = four[n];
    }
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// vdpbf16ps: exact products of bfloat16, float32 accumulation. int8 weights are exact in bfloat16.
struct BFloat16Dot {
  using X = bf16;
  using W = bf16;
  using Sum = float;
  static constexpr int step = 32, MR = 6, NR = 4;
  template <typename T>
  static void pack_x(X* out, const T* x, int64_t size, int64_t room) { pack(out, x, size, room); }
  template <typename T>
  static Sum pack_w(W* out, const T* w, int64_t size, int64_t room) {
    pack(out, w, size, room);
    return 0;
  }
  static void pack(bf16* out, const bf16* x, int64_t size, int64_t room) {
    std::memcpy(out, x, size * sizeof(bf16));
    std::memset(out + size, 0, (room - size) * sizeof(bf16));
  }
  template <typename T>
  static void pack(bf16* out, const T* x, int64_t size, int64_t room) {
    for_each_vector(size, [&](int64_t i, int n) { store_count(out + i, load_count(x + i, n), n); });
    std::memset(out + size, 0, (room - size) * sizeof(bf16));
  }
  static __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static void tile(const X* x, const W* w, int64_t size, Sum* out) {
    __m512 acc[MR][NR];
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NR; ++n) acc[m][n] = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += step) {
      __m512bh weight[NR];
      for (int n = 0; n < NR; ++n) weight[n] = load_pairs(w + n * size + i);
      for (int m = 0; m < MR; ++m) {
        __m512bh value = load_pairs(x + m * size + i);
        for (int n = 0; n < NR; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], value, weight[n]);
      }
    }
    for (int m = 0; m < MR; ++m) sum4(out + m * NR, {acc[m][0]}, {acc[m][1]}, {acc[m][2]}, {acc[m][3]});
  }
};
#define PORTER_BFLOAT16_DOT 1
#endif

// The int8 product; pack_w returns what the unsigned offset adds to every sum of the row, negated.
struct Int8Gemm {
  using X = Int8Dot::Activation;
  using W = Int8Dot::Packed;
  using Sum = int32_t;
  static constexpr int step = Int8Dot::step, MR = Int8Dot::MR, NR = Int8Dot::NR;
  static void pack_x(X* out, const int8_t* x, int64_t size, int64_t room) {
    for (int64_t i = 0; i < size; ++i) out[i] = Int8Dot::activation(x[i]);
    for (int64_t i = size; i < room; ++i) out[i] = 0;
  }
  static Sum pack_w(W* out, const int8_t* w, int64_t size, int64_t room) {
    int32_t total = 0;
    for (int64_t i = 0; i < size; ++i) out[i] = w[i], total += w[i];
    for (int64_t i = size; i < room; ++i) out[i] = 0;
    return Int8Dot::offset ? static_cast<Sum>(0u - 128u * static_cast<uint32_t>(total)) : 0;
  }
  static void tile(const X* x, const W* w, int64_t size, Sum* out) {
    Int8Dot::Register acc[MR][NR];
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NR; ++n) acc[m][n] = Int8Dot::clear();
    for (int64_t i = 0; i < size; i += step) {
      Int8Dot::Register weight[NR];
      for (int n = 0; n < NR; ++n) weight[n] = Int8Dot::load_weight(w + n * size + i);
      for (int m = 0; m < MR; ++m) {
        Int8Dot::Register value = Int8Dot::load_activation(x + m * size + i);
        for (int n = 0; n < NR; ++n) acc[m][n] = Int8Dot::multiply_add(acc[m][n], value, weight[n]);
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int n = 0; n < NR; ++n) out[m * NR + n] = Int8Dot::total(acc[m][n]);
  }
};

static inline float add(float a, float b) { return a + b; }
static inline int32_t add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

struct Blocking {
  int64_t rows, columns, depth;
};

// Blocks that stay in a 1 MiB second-level cache, and at least four column blocks a thread where N allows.
template <typename Dot>
static inline Blocking blocking(int64_t n, int64_t k, int64_t threads) {
  int64_t columns = smaller(96, round_up(divide_up(n, 4 * threads), Dot::NR * 4));
  return {48 * Dot::MR, columns, smaller(round_up(k, Dot::step), 4096 / static_cast<int64_t>(sizeof(typename Dot::X)))};
}

template <typename Dot>
struct GemmScratch {
  Scratch x, w, c, initial;
};

// One block of the product, into c[m][columns of the block].
template <typename Dot, typename RowX, typename RowW>
static inline void gemm_block(int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t k, Blocking block, RowX row_x,
                              RowW row_w, GemmScratch<Dot>& scratch) {
  using Sum = typename Dot::Sum;
  constexpr int MR = Dot::MR, NR = Dot::NR;
  int64_t m_room = round_up(m1 - m0, MR), n_room = round_up(n1 - n0, NR);
  auto* x = scratch.x.template get<typename Dot::X>(m_room * block.depth);
  auto* w = scratch.w.template get<typename Dot::W>(n_room * block.depth);
  Sum* c = scratch.c.template get<Sum>(m_room * n_room);
  Sum* initial = scratch.initial.template get<Sum>(n_room);
  std::memset(c, 0, m_room * n_room * sizeof(Sum));
  for (int64_t k0 = 0; k0 < k; k0 += block.depth) {
    int64_t size = smaller(block.depth, k - k0), room = round_up(size, Dot::step);
    std::memset(static_cast<void*>(w + (n1 - n0) * room), 0, (n_room - (n1 - n0)) * room * sizeof(*w));
    std::memset(static_cast<void*>(x + (m1 - m0) * room), 0, (m_room - (m1 - m0)) * room * sizeof(*x));
    for (int64_t n = n0; n < n1; ++n) initial[n - n0] = Dot::pack_w(w + (n - n0) * room, row_w(n) + k0, size, room);
    for (int64_t n = n1 - n0; n < n_room; ++n) initial[n] = 0;
    for (int64_t m = m0; m < m1; ++m) Dot::pack_x(x + (m - m0) * room, row_x(m) + k0, size, room);
    for (int64_t m = 0; m < m_room; m += MR) {
      for (int64_t n = 0; n < n_room; n += NR) {
        Sum sums[MR * NR];
        Dot::tile(x + m * room, w + n * room, room, sums);
        for (int i = 0; i < MR; ++i)
          for (int j = 0; j < NR; ++j) {
            Sum& target = c[(m + i) * n_room + n + j];
            target = add(target, add(sums[i * NR + j], initial[n + j]));
          }
      }
    }
  }
}

// row_x(m) and row_w(n) point at rows of K elements; emit(m, n0, n1, sums) takes one row of finished sums.
template <typename Dot, typename RowX, typename RowW, typename Emit>
static inline void gemm(int64_t m, int64_t n, int64_t k, int threads, RowX row_x, RowW row_w, Emit emit) {
  Blocking block = blocking<Dot>(n, k, threads);
  int64_t m_blocks = divide_up(m, block.rows), n_blocks = divide_up(n, block.columns);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t item = 0; item < m_blocks * n_blocks; ++item) {
    static thread_local GemmScratch<Dot> scratch;
    int64_t m0 = item / n_blocks * block.rows, n0 = item % n_blocks * block.columns;
    int64_t m1 = smaller(m0 + block.rows, m), n1 = smaller(n0 + block.columns, n);
    gemm_block<Dot>(m0, m1, n0, n1, k, block, row_x, row_w, scratch);
    const auto* c = scratch.c.template get<typename Dot::Sum>(0);
    int64_t n_room = round_up(n1 - n0, Dot::NR);
    for (int64_t i = m0; i < m1; ++i) emit(i, n0, n1, c + (i - m0) * n_room);
  }
}

}  // namespace porter
