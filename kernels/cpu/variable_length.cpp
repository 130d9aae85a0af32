// Attention within segments of one packed sequence, as vision towers need it: each (segment, block of rows, head) is one
// piece of work, and no score between segments is computed.
#include "attend.h"
#include "abi.h"

// bounds: where the `segments` segments begin, and the number of tokens at last. shape: segments, heads, D, Dv. strides in
// elements: query (n, h), key (n, h), value (n, h). out is [N, H, Dv], contiguous.
PORTER_EXPORT void porter_variable_length(void* out, const void* query, const void* key, const void* value,
                                          const int64_t* bounds, const int64_t* shape, const int64_t* strides,
                                          double scaling, int32_t dtype, int32_t threads) {
  using namespace porter;
  int64_t segments = shape[0], heads = shape[1], size = shape[2], value_size = shape[3];
  struct Block {
    int64_t low, high, first;
  };
  std::vector<Block> blocks;
  for (int64_t s = 0; s < segments; ++s)
    for (int64_t first = bounds[s]; first < bounds[s + 1]; first += kRowBlock)
      blocks.push_back({bounds[s], bounds[s + 1], first});
  int64_t items = static_cast<int64_t>(blocks.size()) * heads, room = padded(value_size);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
      static thread_local Scratch memory;
      const Block& block = blocks[item / heads];
      int64_t h = item % heads, count = smaller(kRowBlock, block.high - block.first), keys = block.high - block.low;
      KeysAndValues<T> kv{1,
                          {static_cast<const T*>(key) + block.low * strides[2] + h * strides[3], nullptr},
                          {strides[2], 0},
                          {size, 0},
                          static_cast<const T*>(value) + block.low * strides[4] + h * strides[5],
                          strides[4],
                          value_size};
      int64_t query_room = kv.query_room();
      float* q = memory.get<float>(count * (query_room + room));
      float* accumulated = q + count * query_room;
      std::memset(accumulated, 0, count * room * sizeof(float));
      Visible sees[kRowBlock];
      float maxima[kRowBlock], totals[kRowBlock];
      for (int64_t r = 0; r < count; ++r) {
        pack_row(q + r * query_room,
                 static_cast<const T*>(query) + (block.first + r) * strides[0] + h * strides[1], size);
        sees[r] = Visible{0, keys, nullptr, 0, 0};
        maxima[r] = kMinusInfinity, totals[r] = 0;
      }
      attend(q, query_room, sees, count, kv, 0, keys, static_cast<float>(scaling), accumulated, room, maxima, totals);
      for (int64_t r = 0; r < count; ++r) {
        T* target = static_cast<T*>(out) + ((block.first + r) * heads + h) * value_size;
        const float* result = accumulated + r * room;
        Vec weight = set1(1.0f / totals[r]);
        for_each_vector(value_size,
                        [&](int64_t i, int n) { store_count(target + i, load_count(result + i, n) * weight, n); });
      }
    }
  });
}
