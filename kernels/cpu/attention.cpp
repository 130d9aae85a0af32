// Grouped-query attention over a key-value cache read in place. Made for decode: the query heads that share a key head
// read it once, and a long cache is split over threads.
#include "attend.h"
#include "kernels.h"

namespace porter {
namespace {

// shape: B, Hq, S, D, Hk, T, Dv, window (0: none). strides in elements: query (b, h, s), key (b, h, t), value (b, h, t),
// mask (b, h, s, t). mask null: causal, aligned to the end. out is [B, S, Hq, Dv], contiguous.
// sinks [Hq], or null: none.
void grouped_attention(void* out, const void* query, const void* key, const void* value, const float* sinks,
                       const void* mask, const int64_t* shape, const int64_t* strides, double scaling, int32_t dtype,
                       int32_t mask_dtype, int32_t threads) {
  int64_t heads = shape[1], length = shape[2], size = shape[3], key_heads = shape[4], keys = shape[5];
  int64_t value_size = shape[6], window = shape[7], shared = heads / key_heads;
  AttentionShape attention{shape[0] * key_heads, length * shared, keys, value_size, static_cast<float>(scaling), threads};
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    auto head_of = [&](int64_t group, int64_t row) { return group % key_heads * shared + row % shared; };
    auto keys_of = [&](int64_t group) {
      int64_t b = group / key_heads, h = group % key_heads;
      return KeysAndValues<T>{1,
                              {static_cast<const T*>(key) + b * strides[3] + h * strides[4], nullptr},
                              {strides[5], 0},
                              {size, 0},
                              static_cast<const T*>(value) + b * strides[6] + h * strides[7],
                              strides[8],
                              value_size};
    };
    auto query_of = [&](int64_t group, int64_t row, float* target) {
      const T* source = static_cast<const T*>(query) + group / key_heads * strides[0];
      pack_row(target, source + head_of(group, row) * strides[1] + row / shared * strides[2], size);
    };
    int64_t mask_size = mask_dtype == kFloat32 ? 4 : mask_dtype == kBool ? 1 : 2;
    auto visible = [&](int64_t group, int64_t row) {
      int64_t s = row / shared;
      if (mask != nullptr) {
        int64_t offset = group / key_heads * strides[9] + head_of(group, row) * strides[10] + s * strides[11];
        return Visible{0, keys, static_cast<const char*>(mask) + offset * mask_size, strides[12], mask_dtype};
      }
      int64_t high = keys - length + s + 1, low = window > 0 ? high - window : 0;
      return Visible{low > 0 ? low : 0, high > 0 ? high : 0, nullptr, 0, 0};
    };
    auto write = [&](int64_t group, int64_t row, const float* result) {
      int64_t index = (group / key_heads * length + row / shared) * heads + head_of(group, row);
      T* target = static_cast<T*>(out) + index * value_size;
      for_each_vector(value_size, [&](int64_t i, int n) { store_count(target + i, load_count(result + i, n), n); });
    };
    auto sink = [&](int64_t group, int64_t row) { return sinks == nullptr ? kMinusInfinity : sinks[head_of(group, row)]; };
    attend_all(attention, keys_of, query_of, visible, write, sink);
  });
}

}  // namespace
}  // namespace porter

PORTER_EXPORT void porter_attention(void* out, const void* query, const void* key, const void* value, const void* mask,
                                    const int64_t* shape, const int64_t* strides, double scaling, int32_t dtype,
                                    int32_t mask_dtype, int32_t threads) {
  porter::grouped_attention(out, query, key, value, nullptr, mask, shape, strides, scaling, dtype, mask_dtype, threads);
}

PORTER_EXPORT void porter_sink_attention(void* out, const void* query, const void* key, const void* value,
                                         const float* sinks, const void* mask, const int64_t* shape,
                                         const int64_t* strides, double scaling, int32_t dtype, int32_t mask_dtype,
                                         int32_t threads) {
  porter::grouped_attention(out, query, key, value, sinks, mask, shape, strides, scaling, dtype, mask_dtype, threads);
}
