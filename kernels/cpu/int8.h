// Exact int8 dot products with int32 accumulation. With VNNI the activations are stored as x + 128 (unsigned) and
// 128 * sum(w) is taken off again; without it both sides are widened to int16, whose pairwise products cannot
// overflow int32. The saturating 8-bit multiply-add (vpmaddubsw) is never used: 127 * 127 * 2 does not fit int16.
#pragma once
#include "abi.h"

namespace porter {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct Int8Dot {
  using Activation = uint8_t;
  using Packed = int8_t;
  using Register = __m512i;
  static constexpr int step = 64, MR = 4, NR = 4;
  static constexpr bool offset = true;
  static Activation activation(int8_t x) { return static_cast<uint8_t>(x + 128); }
  static Register clear() { return _mm512_setzero_si512(); }
  static Register load_activation(const Activation* p) { return _mm512_loadu_si512(p); }
  static Register load_weight(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Register multiply_add(Register acc, Register x, Register w) { return _mm512_dpbusd_epi32(acc, x, w); }
  static Register add_weight(Register acc, Register w) { return _mm512_dpbusd_epi32(acc, _mm512_set1_epi8(1), w); }
  static int32_t total(Register acc) { return _mm512_reduce_add_epi32(acc); }
};
#elif defined(__AVX512BW__)
struct Int8Dot {
  using Activation = int16_t;
  using Packed = int16_t;
  using Register = __m512i;
  static constexpr int step = 32, MR = 4, NR = 4;
  static constexpr bool offset = false;
  static Activation activation(int8_t x) { return x; }
  static Register clear() { return _mm512_setzero_si512(); }
  static Register load_activation(const Activation* p) { return _mm512_loadu_si512(p); }
  static Register load_weight(const int16_t* p) { return _mm512_loadu_si512(p); }
  static Register load_weight(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Register multiply_add(Register acc, Register x, Register w) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(x, w));
  }
  static Register add_weight(Register acc, Register) { return acc; }
  static int32_t total(Register acc) { return _mm512_reduce_add_epi32(acc); }
};
#elif defined(__AVX2__)
struct Int8Dot {
  using Activation = int16_t;
  using Packed = int16_t;
  using Register = __m256i;
  static constexpr int step = 16, MR = 4, NR = 2;
  static constexpr bool offset = false;
  static Activation activation(int8_t x) { return x; }
  static Register clear() { return _mm256_setzero_si256(); }
  static Register load_activation(const Activation* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Register load_weight(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Register load_weight(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Register multiply_add(Register acc, Register x, Register w) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(x, w));
  }
  static Register add_weight(Register acc, Register) { return acc; }
  static int32_t total(Register acc) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
};
#else
struct Int8Dot {
  typedef int32_t Words __attribute__((vector_size(32)));
  using Activation = int16_t;
  using Packed = int16_t;
  using Register = Words;
  static constexpr int step = 8, MR = 2, NR = 2;
  static constexpr bool offset = false;
  static Activation activation(int8_t x) { return x; }
  static Register clear() { return Words{}; }
  template <typename T>
  static Register load_words(const T* p) {
    Words r;
    for (int i = 0; i < step; ++i) r[i] = p[i];
    return r;
  }
  static Register load_activation(const Activation* p) { return load_words(p); }
  template <typename T>
  static Register load_weight(const T* p) { return load_words(p); }
  static Register multiply_add(Register acc, Register x, Register w) { return acc + x * w; }
  static Register add_weight(Register acc, Register) { return acc; }
  static int32_t total(Register acc) {
    int32_t s = 0;
    for (int i = 0; i < step; ++i) s += acc[i];
    return s;
  }
};
#endif

// One row to int8: scale = absmax / 127, codes rounded half to even. A zero row has scale 0 and codes 0; a row with a
// NaN or an infinity has scale NaN, because the codes cannot say so.
template <typename T>
static inline float quantize_row(int8_t* out, const T* x, int64_t size) {
  Vec largest = zero(), zeros = zero();
  for_each_vector(size, [&](int64_t i, int n) {
    Vec value = load_count(x + i, n);
    largest = vmax(largest, vabs(value));
    zeros = fma(value, zero(), zeros);
  });
  float scale = maximum(largest) / 127.0f + sum(zeros);
  Vec divisor = set1(scale > 0 ? scale : 1.0f), low = set1(-127.0f), high = set1(127.0f);
  for_each_vector(size, [&](int64_t i, int n) {
    Vec code = vmax(low, vmin(high, round_even(load_count(x + i, n) / divisor)));
    int8_t whole[Vec::width];
    store_int8(whole, code);
    std::memcpy(out + i, whole, n);
  });
  return scale;
}

static inline int64_t padded_int8(int64_t size) { return round_up(size, Int8Dot::step); }

static inline void pack_int8_row(Int8Dot::Activation* out, const int8_t* codes, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = Int8Dot::activation(codes[i]);
  for (int64_t i = size; i < padded_int8(size); ++i) out[i] = 0;
}

// Weight rows one after the other where few rows of x need them (see dot_stream), side by side otherwise.
template <int MR, int NR>
static inline void int8_block(const Int8Dot::Activation* x, int64_t x_stride, const int8_t* w, int64_t w_stride,
                              int64_t size, int32_t* out) {
  Int8Dot::Register acc[MR][NR], sums[NR];
  for (int n = 0; n < NR; ++n) {
    sums[n] = Int8Dot::clear();
    for (int m = 0; m < MR; ++m) acc[m][n] = Int8Dot::clear();
  }
  auto accumulate = [&](int n, int64_t i, const int8_t* weights) {
    Int8Dot::Register weight = Int8Dot::load_weight(weights);
    sums[n] = Int8Dot::add_weight(sums[n], weight);
    for (int m = 0; m < MR; ++m)
      acc[m][n] = Int8Dot::multiply_add(acc[m][n], Int8Dot::load_activation(x + m * x_stride + i), weight);
  };
  int64_t whole = size - size % Int8Dot::step;
  if constexpr (MR <= 2) {
    for (int n = 0; n < NR; ++n)
      for (int64_t i = 0; i < whole; i += Int8Dot::step) accumulate(n, i, w + n * w_stride + i);
  } else {
    for (int64_t i = 0; i < whole; i += Int8Dot::step)
      for (int n = 0; n < NR; ++n) accumulate(n, i, w + n * w_stride + i);
  }
  for (int n = 0; whole < size && n < NR; ++n) {
    int8_t tail[Int8Dot::step] = {};
    std::memcpy(tail, w + n * w_stride + whole, size - whole);
    accumulate(n, whole, tail);
  }
  for (int n = 0; n < NR; ++n) {
    // Unsigned, because the offset product may wrap before it is taken off; the difference is exact modulo 2^32.
    uint32_t correction = Int8Dot::offset ? 128u * static_cast<uint32_t>(Int8Dot::total(sums[n])) : 0u;
    for (int m = 0; m < MR; ++m)
      out[m * NR + n] = static_cast<int32_t>(static_cast<uint32_t>(Int8Dot::total(acc[m][n])) - correction);
  }
}

template <int MR>
static inline void int8_strip(const Int8Dot::Activation* x, int64_t x_stride, const int8_t* w, int64_t w_stride,
                              int64_t rows, int64_t size, int32_t* out, int64_t out_stride) {
  constexpr int NR = (Int8Dot::step == 64 || MR <= 2) ? 4 : 2;
  int32_t block[MR * NR];
  int64_t n = 0;
  for (; n + NR <= rows; n += NR) {
    int8_block<MR, NR>(x, x_stride, w + n * w_stride, w_stride, size, block);
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < NR; ++j) out[m * out_stride + n + j] = block[m * NR + j];
  }
  for (; n < rows; ++n) {
    int8_block<MR, 1>(x, x_stride, w + n * w_stride, w_stride, size, block);
    for (int m = 0; m < MR; ++m) out[m * out_stride + n] = block[m];
  }
}

static inline void int8_dots(const Int8Dot::Activation* x, int64_t x_stride, int64_t count, const int8_t* w,
                             int64_t w_stride, int64_t rows, int64_t size, int32_t* out, int64_t out_stride) {
  for (int64_t m = 0; m < count; m += 4) {
    const Int8Dot::Activation* group = x + m * x_stride;
    int32_t* target = out + m * out_stride;
    switch (smaller(count - m, 4)) {
      case 4: int8_strip<4>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      case 3: int8_strip<3>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      case 2: int8_strip<2>(group, x_stride, w, w_stride, rows, size, target, out_stride); break;
      default: int8_strip<1>(group, x_stride, w, w_stride, rows, size, target, out_stride);
    }
  }
}

}  // namespace porter
