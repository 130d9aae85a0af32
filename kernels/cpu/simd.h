// One small vector interface for every instruction set: Vec is a register of float32, with loads and stores that
// convert from and to bfloat16 and int8. Each section below implements the same functions; the kernels never name
// an instruction set except where an integer or bfloat16 dot product instruction exists (int8.h, gemm.h, digits.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace porter {

struct bf16 {
  uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return static_cast<float>(x); }
static inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <typename T>
static inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
// Round to nearest even, as torch does; NaN stays a quiet NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// ---------------------------------------------------------------------------------------------- AVX-512
#define PORTER_ISA "avx512"
struct Vec {
  static constexpr int width = 16;
  __m512 v;
};
static inline Vec zero() { return {_mm512_setzero_ps()}; }
static inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in the second operand wins in both: callers put the data second.
static inline Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec vabs(Vec a) { return {_mm512_abs_ps(a.v)}; }
static inline Vec round_even(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Vec times_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
static inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
static inline float maximum(Vec a) { return _mm512_reduce_max_ps(a.v); }
static inline __m256 fold(Vec a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
// The sums of four vectors, sharing the shuffles.
static inline void sum4(float* out, Vec a, Vec b, Vec c, Vec d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline Vec widen(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static inline Vec widen(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
static inline __m256i narrow(Vec a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
static inline Vec load(const int8_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
static inline Vec load_first(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
static inline Vec load_first(const int8_t* p, int n) { return widen(_mm_maskz_loadu_epi8(first(n), p)); }
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
static inline void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
static inline void store_first(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
static inline void store_first(bf16* p, Vec a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(a)); }
// Values must be whole numbers in [-128, 127].
static inline void store_int8(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

#elif defined(__AVX2__) && defined(__FMA__)
// ------------------------------------------------------------------------------------------------- AVX2
#define PORTER_ISA "avx2"
struct Vec {
  static constexpr int width = 8;
  __m256 v;
};
static inline Vec zero() { return {_mm256_setzero_ps()}; }
static inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline Vec vmin(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline Vec vabs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
static inline Vec round_even(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// Two steps, so that n may reach one past the largest and below the smallest normal exponent.
static inline Vec times_power_of_two(Vec a, Vec n) {
  __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)))};
}
static inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline void sum4(float* out, Vec a, Vec b, Vec c, Vec d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
static inline float maximum(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline __m128i narrow(Vec a) {
  __m256i bits = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
static inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline Vec load(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
static inline Vec load(const int8_t* p) {
  __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
static inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
static inline void store(bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a)); }
static inline void store_int8(int8_t* p, Vec a) {
  __m256i whole = _mm256_cvtps_epi32(a.v);
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
#define PORTER_PARTIAL_BY_COPY 1

#else
// --------------------------------------------- any other processor: the compiler's own vectors (NEON, SSE2)
#define PORTER_ISA "generic"
typedef float native8 __attribute__((vector_size(32), aligned(4)));
struct Vec {
  static constexpr int width = 8;
  native8 v;
};
#define PORTER_EACH(expression)                      \
  Vec r;                                             \
  for (int i = 0; i < Vec::width; ++i) r.v[i] = (expression); \
  return r;
static inline Vec set1(float x) { PORTER_EACH(x) }
static inline Vec zero() { return set1(0.0f); }
static inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
static inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
static inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
static inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
static inline Vec vmax(Vec a, Vec b) { PORTER_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
static inline Vec vmin(Vec a, Vec b) { PORTER_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]) }
static inline Vec vabs(Vec a) { PORTER_EACH(std::fabs(a.v[i])) }
static inline Vec round_even(Vec a) { PORTER_EACH(std::nearbyintf(a.v[i])) }
static inline Vec times_power_of_two(Vec a, Vec n) { PORTER_EACH(std::ldexp(a.v[i], n.v[i] == n.v[i] ? (int)n.v[i] : 0)) }
static inline float sum(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
static inline void sum4(float* out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}
static inline float maximum(Vec a) {
  float m = a.v[0];
  for (int i = 1; i < Vec::width; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
template <typename T>
static inline Vec load(const T* p) { PORTER_EACH(to_float(p[i])) }
template <typename T>
static inline void store(T* p, Vec a) {
  for (int i = 0; i < Vec::width; ++i) p[i] = from_float<T>(a.v[i]);
}
static inline void store_int8(int8_t* p, Vec a) {
  for (int i = 0; i < Vec::width; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
#define PORTER_PARTIAL_BY_COPY 1
#endif

#if defined(PORTER_PARTIAL_BY_COPY)
template <typename T>
static inline Vec load_first(const T* p, int n) {
  T full[Vec::width] = {};
  std::memcpy(full, p, n * sizeof(T));
  return load(full);
}
template <typename T>
static inline void store_first(T* p, Vec a, int n) {
  T full[Vec::width];
  store(full, a);
  std::memcpy(p, full, n * sizeof(T));
}
#endif

// exp, about 1 ulp: 2^n times a degree 6 polynomial on [-ln2/2, ln2/2] (Cephes expf coefficients). Below -105 the
// result is 0, above 88.7 the largest float32; NaN passes through.
static inline Vec exp(Vec x) {
  x = vmax(set1(-105.0f), vmin(set1(88.72283f), x));
  Vec n = round_even(x * set1(1.44269504088896341f));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return times_power_of_two(p, n);
}

static inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(zero() - x)); }

// Calls body(offset, count) for every whole vector of [0, size), then once for what remains.
template <typename Body>
static inline void for_each_vector(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + Vec::width <= size; i += Vec::width) body(i, Vec::width);
  if (i < size) body(i, static_cast<int>(size - i));
}
template <typename T>
static inline Vec load_count(const T* p, int n) { return n == Vec::width ? load(p) : load_first(p, n); }
template <typename T>
static inline void store_count(T* p, Vec a, int n) {
  if (n == Vec::width) store(p, a);
  else store_first(p, a, n);
}

}  // namespace porter
