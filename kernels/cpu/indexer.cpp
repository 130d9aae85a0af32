// The lightning indexer: scores of every visible key (a weighted sum over heads of relu(query . key)), and the keys of the
// highest scores for each query, in the order of the cache. Of equal scores the earlier key is taken.
#include <algorithm>
#include <vector>

#include "rows.h"
#include "selection.h"

namespace porter {
namespace {

constexpr int64_t kScored = 64;      // keys scored together: their products stay in the first-level cache
constexpr int64_t kSpan = 1024;      // keys of one unit of parallel work
constexpr int64_t kBuffer = 1 << 20; // scores held at once

// Larger for larger scores, and for equal scores larger for earlier keys; NaN above all, as torch ranks it.
inline uint64_t rank(float score, int64_t key) {
  uint32_t bits;
  score = score == 0.0f ? 0.0f : score;
  std::memcpy(&bits, &score, 4);
  if (score != score) bits = 0x7fffffff;
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(key));
}

inline int64_t key_of(uint64_t ranked) { return 0xffffffffu - static_cast<uint32_t>(ranked); }

// scores[t] for t in [first, last), without the mask. query: `heads` packed rows; key: the first row.
template <typename T>
void score(float* scores, const float* query, const float* weights, int64_t heads, const T* key, int64_t stride,
           int64_t size, int64_t first, int64_t last, float scaling) {
  static thread_local Scratch memory;
  float* products = memory.get<float>(heads * kScored);
  for (int64_t t = first; t < last; t += kScored) {
    int64_t count = smaller(kScored, last - t);
    dots(query, padded(size), heads, key + t * stride, stride, count, size, products, kScored);
    for_each_vector(count, [&](int64_t i, int n) {
      Vec total = zero();
      for (int64_t h = 0; h < heads; ++h) {
        // The data second: a NaN must not become 0.
        total = fma(set1(weights[h]), vmax(zero(), load(products + h * kScored + i)), total);
      }
      store_count(scores + t + i, total * set1(scaling), n);
    });
  }
}

// The best `top_k` of the ranked keys; where there are fewer, the first hidden keys fill the row.
void choose(int32_t* out, uint64_t* ranked, int64_t count, int64_t top_k, const MaskRow& sees) {
  int64_t taken = smaller(count, top_k);
  if (taken < count) std::nth_element(ranked, ranked + taken, ranked + count, std::greater<uint64_t>());
  for (int64_t i = 0; i < taken; ++i) out[i] = static_cast<int32_t>(key_of(ranked[i]));
  std::sort(out, out + taken);
  for (int64_t t = 0; taken < top_k; ++t)
    if (!sees.sees(t)) out[taken++] = static_cast<int32_t>(t);
}

}  // namespace
}  // namespace porter

// shape: B, S, H, D, T, K (at most T). strides in elements: query (b, s, h), key (b, t), weights (b, s), mask (b, s, t);
// mask null: causal, aligned to the end. out int32 [B, S, K], contiguous.
PORTER_EXPORT void porter_indexer(int32_t* out, const void* query, const void* key, const void* weights,
                                  const void* mask, const int64_t* shape, const int64_t* strides, double scaling,
                                  int32_t dtype, int32_t weights_dtype, int32_t mask_dtype, int32_t threads) {
  using namespace porter;
  int64_t length = shape[1], heads = shape[2], size = shape[3], keys = shape[4], top_k = shape[5];
  int64_t rows = shape[0] * length, room = padded(size), spans = divide_up(keys, kSpan);
  int64_t block = smaller(rows, divide_up(kBuffer, keys));
  static thread_local Scratch query_memory, score_memory;
  float* packed = query_memory.get<float>(block * heads * (room + 1));
  float* weight = packed + block * heads * room;
  float* scores = score_memory.get<float>(block * keys);
  std::vector<int64_t> firsts(block), lasts(block), seen(block);
  auto mask_row = [&](int64_t row) {
    int64_t b = row / length, s = row % length;
    return MaskRow{mask, mask_dtype, b * strides[7] + s * strides[8], strides[9], keys, keys - length + s + 1};
  };
  for (int64_t row0 = 0; row0 < rows; row0 += block) {
    int64_t count = smaller(block, rows - row0);
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      MaskRow sees = mask_row(row0 + i);
      firsts[i] = keys, lasts[i] = 0, seen[i] = 0;
      for (int64_t t = 0; t < keys; ++t) {
        if (!sees.sees(t)) continue;
        firsts[i] = smaller(firsts[i], t), lasts[i] = t + 1, ++seen[i];
      }
      int64_t b = (row0 + i) / length, s = (row0 + i) % length;
      dispatch(dtype, [&](auto tag) {
        const auto* source = static_cast<const decltype(tag)*>(query) + b * strides[0] + s * strides[1];
        for (int64_t h = 0; h < heads; ++h) pack_row(packed + (i * heads + h) * room, source + h * strides[2], size);
      });
      dispatch(weights_dtype, [&](auto tag) {
        const auto* source = static_cast<const decltype(tag)*>(weights) + b * strides[5] + s * strides[6];
        for (int64_t h = 0; h < heads; ++h) weight[i * heads + h] = to_float(source[h]);
      });
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t item = 0; item < count * spans; ++item) {
      int64_t i = item / spans, span = item % spans * kSpan;
      int64_t first = -smaller(-firsts[i], -span), last = smaller(lasts[i], span + kSpan);
      if (seen[i] <= top_k || first >= last) continue;  // all of the few are taken, whatever their scores
      dispatch(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* source = static_cast<const T*>(key) + (row0 + i) / length * strides[3];
        score(scores + i * keys, packed + i * heads * room, weight + i * heads, heads, source, strides[4], size, first,
              last, static_cast<float>(scaling));
      });
    }
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1) schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) {
      static thread_local Scratch memory;
      uint64_t* ranked = memory.get<uint64_t>(seen[i] + 1);
      MaskRow sees = mask_row(row0 + i);
      bool scored = seen[i] > top_k;
      int64_t found = 0;
      for (int64_t t = firsts[i]; t < lasts[i]; ++t)
        if (sees.sees(t)) ranked[found++] = rank(scored ? scores[i * keys + t] + sees.bias(t) : 0.0f, t);
      choose(out + (row0 + i) * top_k, ranked, found, top_k, sees);
    }
  }
}
