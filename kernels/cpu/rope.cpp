// Rotary position embedding of query and key, [B, H, S, D] with any strides (the last dimension contiguous).
// half: the pair of dimension i is i + R/2; dimensions past R pass through. interleaved: pairs (2i, 2i + 1) in, half
// layout out, as deepseek_v3's apply_rotary_pos_emb_interleave. cos and sin are [B, S, R], both halves given.
// complex: pairs (2i, 2i + 1) in and out, as deepseek_v2's apply_rotary_emb; the cosine and sine of pair i stand at 2i of
// cos and sin, which point into one array of complex numbers.
// trailing: as complex on the last R dimensions, the cosine and sine of pair i standing at i; dimensions before them pass
// through. There need not be keys.
#include "kernels.h"

namespace porter {
namespace {

template <typename T, typename C>
void rotate_half(T* out, const T* x, const C* cos, const C* sin, int64_t rotary, int64_t size) {
  int64_t half = rotary / 2;
  for_each_vector(half, [&](int64_t i, int n) {
    Vec a = load_count(x + i, n), b = load_count(x + half + i, n);
    store_count(out + i, a * load_count(cos + i, n) - b * load_count(sin + i, n), n);
    store_count(out + half + i, b * load_count(cos + half + i, n) + a * load_count(sin + half + i, n), n);
  });
  if (rotary < size) std::memcpy(out + rotary, x + rotary, (size - rotary) * sizeof(T));
}

template <typename T, typename C>
void rotate_interleaved(T* out, const T* x, const C* cos, const C* sin, int64_t rotary) {
  int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    out[i] = from_float<T>(a * to_float(cos[i]) - b * to_float(sin[i]));
    out[half + i] = from_float<T>(b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
  }
}

template <typename T, typename C>
void rotate_complex(T* out, const T* x, const C* cos, const C* sin, int64_t rotary) {
  for (int64_t i = 0; i < rotary; i += 2) {
    float a = to_float(x[i]), b = to_float(x[i + 1]), c = to_float(cos[i]), s = to_float(sin[i]);
    out[i] = from_float<T>(a * c - b * s);
    out[i + 1] = from_float<T>(b * c + a * s);
  }
}

template <typename T, typename C>
void rotate_trailing(T* out, const T* x, const C* cos, const C* sin, int64_t rotary, int64_t size) {
  int64_t passed = size - rotary;
  std::memcpy(out, x, passed * sizeof(T));
  for (int64_t i = 0; i < rotary / 2; ++i) {
    float a = to_float(x[passed + 2 * i]), b = to_float(x[passed + 2 * i + 1]), c = to_float(cos[i]), s = to_float(sin[i]);
    out[passed + 2 * i] = from_float<T>(a * c - b * s);
    out[passed + 2 * i + 1] = from_float<T>(b * c + a * s);
  }
}

enum Style : int32_t { half_style, interleaved_style, complex_style, trailing_style };

// One [B, H, S, D] tensor and where its rotated copy goes; strides (b, h, s) in elements.
template <typename T>
struct Heads {
  const T* x;
  T* out;
  const int64_t *stride, *out_stride;

  const T* source(int64_t b, int64_t h, int64_t s) const { return x + b * stride[0] + h * stride[1] + s * stride[2]; }
  T* target(int64_t b, int64_t h, int64_t s) const {
    return out + b * out_stride[0] + h * out_stride[1] + s * out_stride[2];
  }
};

}  // namespace
}  // namespace porter

// shape: B, S, D, R, query heads, key heads. strides in elements: query, its output, key, its output (each b, h, s), cos
// (b, s), sin (b, s).
PORTER_EXPORT void porter_rope(void* query_out, void* key_out, const void* query, const void* key, const void* cos,
                               const void* sin, const int64_t* shape, int32_t style, int32_t dtype,
                               int32_t cos_dtype, int32_t threads) {
  using namespace porter;
  const int64_t* strides = shape + 6;
  int64_t length = shape[1], size = shape[2], rotary = shape[3], query_heads = shape[4];
  int64_t heads = query_heads + shape[5], rows = shape[0] * length * heads;
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    Heads<T> queries{static_cast<const T*>(query), static_cast<T*>(query_out), strides, strides + 3};
    Heads<T> keys{static_cast<const T*>(key), static_cast<T*>(key_out), strides + 6, strides + 9};
    dispatch(cos_dtype, [&](auto cos_tag) {
      using C = decltype(cos_tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        int64_t h = row % heads, s = row / heads % length, b = row / heads / length;
        bool is_query = h < query_heads;
        const Heads<T>& side = is_query ? queries : keys;
        if (!is_query) h -= query_heads;
        const C* cosine = static_cast<const C*>(cos) + b * strides[12] + s * strides[13];
        const C* sine = static_cast<const C*>(sin) + b * strides[14] + s * strides[15];
        T* out = side.target(b, h, s);
        const T* x = side.source(b, h, s);
        if (style == trailing_style) rotate_trailing(out, x, cosine, sine, rotary, size);
        else if (style == complex_style) rotate_complex(out, x, cosine, sine, rotary);
        else if (style == interleaved_style) rotate_interleaved(out, x, cosine, sine, rotary);
        else rotate_half(out, x, cosine, sine, rotary, size);
      }
    });
  });
}
