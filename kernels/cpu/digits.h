// int8 weights times bfloat16 rows, exactly. A row of x whose values are all whole multiples of one power of two, less
// than 2^30 of them, is written in three or four signed base-256 digits; each digit's product with the weights is an
// exact sum of 8-bit products (VNNI), and one rounding ends the row. A row of wider range takes the floating-point path.
#pragma once
#include "int8.h"
#include "rows.h"

namespace porter {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define PORTER_DIGITS 1

// x[i] = unit * sum over p of 256^p digit[p * room + i]; count 0: not representable.
struct Digits {
  const int8_t* digit;
  int64_t room, total;  // total: sum over i of x[i] / unit
  float unit;
  int count;
};

constexpr int kMaxDigits = 4;
constexpr int64_t kDigitsLimit = 65536;  // K * 255 * 128 < 2^31

static inline int64_t digits_room(int64_t size) { return round_up(size, 64); }

// x is padded with zeros to a whole number of vectors; digit holds kMaxDigits * digits_room(size) bytes.
static inline Digits to_digits(int8_t* digit, const float* x, int64_t size) {
  Digits result{digit, digits_room(size), 0, 1.0f, 0};
  Vec largest = zero();
  for (int64_t i = 0; i < size; i += Vec::width) largest = vmax(largest, vabs(load(x + i)));
  float top = maximum(largest);
  if (!(top <= std::numeric_limits<float>::max())) return result;
  int exponent = 0;
  std::frexp(top, &exponent);  // top < 2^exponent
  for (int count = 3; count <= kMaxDigits && result.count == 0; ++count) {
    // One bit of sign and one of headroom: the digits below the top one are balanced, and may carry into it.
    Vec shift = set1(static_cast<float>(8 * count - 2 - exponent));
    __mmask16 lost = exponent - 8 * count + 2 < -126;
    for (int64_t i = 0; i < size; i += Vec::width) {
      Vec whole = times_power_of_two(load(x + i), shift);
      lost |= _mm512_cmp_ps_mask(whole.v, round_even(whole).v, _CMP_NEQ_UQ);  // unordered: a NaN is lost too
    }
    if (lost) continue;
    result.count = count;
    result.unit = std::ldexp(1.0f, exponent - 8 * count + 2);
    __m512i totals = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += Vec::width) {
      __m512i whole = _mm512_cvtps_epi32(times_power_of_two(load(x + i), shift).v);
      totals = _mm512_add_epi64(totals, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(whole)));
      totals = _mm512_add_epi64(totals, _mm512_cvtepi32_epi64(_mm512_extracti32x8_epi32(whole, 1)));
      for (int p = 0; p < count; ++p) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digit + p * result.room + i), _mm512_cvtepi32_epi8(whole));
        __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
        whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
      }
    }
    for (int p = 0; p < count; ++p)
      std::memset(digit + p * result.room + padded(size), 0, result.room - padded(size));
    result.total = _mm512_reduce_add_epi64(totals);
  }
  return result;
}

static inline __m128i quarter_sums(__m512i a) {
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti32x8_epi32(a, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The weights are made unsigned (+128), so 128 * total is taken off again.
template <int count>
static inline float digits_dot(const Digits& x, const int8_t* w, int64_t size) {
  const __m512i flip = _mm512_set1_epi8(-128);
  __m512i even[kMaxDigits], odd[kMaxDigits];
  for (int p = 0; p < kMaxDigits; ++p) even[p] = odd[p] = _mm512_setzero_si512();
  auto accumulate = [&](__m512i* sums, int64_t i, __m512i weight) {
    weight = _mm512_xor_si512(weight, flip);
    for (int p = 0; p < count; ++p)
      sums[p] = _mm512_dpbusd_epi32(sums[p], weight, _mm512_loadu_si512(x.digit + p * x.room + i));
  };
  int64_t i = 0;
  for (; i + 128 <= size; i += 128) {
    accumulate(even, i, _mm512_loadu_si512(w + i));
    accumulate(odd, i + 64, _mm512_loadu_si512(w + i + 64));
  }
  for (; i < size; i += 64) {
    __mmask64 kept = size - i >= 64 ? ~0ull : (1ull << (size - i)) - 1;
    accumulate(even, i, _mm512_maskz_loadu_epi8(kept, w + i));
  }
  __m128i sums[kMaxDigits];
  for (int p = 0; p < kMaxDigits; ++p) sums[p] = quarter_sums(_mm512_add_epi32(even[p], odd[p]));
  __m128i totals = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]));
  __m256i placed = _mm256_sllv_epi64(_mm256_cvtepi32_epi64(totals), _mm256_setr_epi64x(0, 8, 16, 24));
  __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(placed), _mm256_extracti128_si256(placed, 1));
  int64_t sum = _mm_cvtsi128_si64(pair) + _mm_extract_epi64(pair, 1) - 128 * x.total;
  return static_cast<float>(sum) * x.unit;
}

static inline void digits_dots(const Digits& x, const int8_t* w, int64_t w_stride, int64_t rows, int64_t size, float* out) {
  if (x.count == 3)
    for (int64_t n = 0; n < rows; ++n) out[n] = digits_dot<3>(x, w + n * w_stride, size);
  else
    for (int64_t n = 0; n < rows; ++n) out[n] = digits_dot<4>(x, w + n * w_stride, size);
}
#endif

}  // namespace porter
