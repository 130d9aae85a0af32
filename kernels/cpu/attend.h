// Softmax attention of packed float32 query rows over keys and values read in place, with a running maximum, so that
// nothing of size T is stored. Used by attention.cpp (grouped queries) and mla.cpp (keys in two parts, one head).
#pragma once
#include <vector>

#include "rows.h"

namespace porter {

// Key t is the concatenation of `parts` rows data[p] + t * stride[p]; value t is value + t * value_stride.
template <typename T>
struct KeysAndValues {
  int parts;
  const T* data[2];
  int64_t stride[2], size[2];
  const T* value;
  int64_t value_stride, value_size;

  int64_t query_room() const { return padded(size[0]) + (parts == 2 ? padded(size[1]) : 0); }
};

// What one query row may see: keys [low, high), and further a row of a mask if there is one.
struct Visible {
  int64_t low, high;
  const void* mask;
  int64_t mask_stride;
  int32_t mask_dtype;
};

constexpr int64_t kKeyChunk = 64, kRowBlock = 32;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <typename M>
static inline void add_mask(float* scores, const M* mask, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) scores[i] += to_float(mask[i * stride]);
}

// Scores of keys [first, first + count): scaled, and minus infinity where not visible.
static inline void mask_scores(float* scores, const Visible& visible, int64_t first, int64_t count, float scaling) {
  for (int64_t i = 0; i < count; ++i) scores[i] *= scaling;
  int64_t stride = visible.mask_stride;
  if (visible.mask != nullptr && visible.mask_dtype == kBool) {
    const uint8_t* mask = static_cast<const uint8_t*>(visible.mask) + first * stride;
    for (int64_t i = 0; i < count; ++i) scores[i] = mask[i * stride] ? scores[i] : kMinusInfinity;
  } else if (visible.mask != nullptr) {
    dispatch(visible.mask_dtype, [&](auto tag) {
      add_mask(scores, static_cast<const decltype(tag)*>(visible.mask) + first * stride, stride, count);
    });
  }
  for (int64_t i = 0; i < smaller(visible.low - first, count); ++i) scores[i] = kMinusInfinity;
  for (int64_t i = visible.high > first ? visible.high - first : 0; i < count; ++i) scores[i] = kMinusInfinity;
}

// Running softmax of one row: scores become weights relative to the new maximum, and what was accumulated is rescaled.
static inline void soften(float* scores, int64_t count, float* accumulated, int64_t size, float& maximum_so_far,
                          float& total) {
  Vec largest = set1(maximum_so_far);
  for (int64_t i = count; i < round_up(count, Vec::width); ++i) scores[i] = kMinusInfinity;
  for (int64_t i = 0; i < count; i += Vec::width) largest = vmax(largest, load(scores + i));
  float next = maximum(largest), pivot = next == kMinusInfinity ? 0.0f : next;
  Vec added = zero();
  for (int64_t i = 0; i < count; i += Vec::width) {
    Vec weight = exp(load(scores + i) - set1(pivot));
    added = added + weight;
    store(scores + i, weight);
  }
  float rescale = std::exp(maximum_so_far - pivot);
  total = total * rescale + sum(added);
  maximum_so_far = next;
  if (rescale == 1.0f) return;
  for_each_vector(size, [&](int64_t i, int n) {
    store_count(accumulated + i, load_count(accumulated + i, n) * set1(rescale), n);
  });
}

// accumulated [count][room], maxima and totals [count] are continued.
template <typename T>
static inline void attend(const float* query, int64_t query_stride, const Visible* visible, int64_t count,
                          const KeysAndValues<T>& kv, int64_t first, int64_t last, float scaling, float* accumulated,
                          int64_t room, float* maxima, float* totals) {
  alignas(64) float scores[kRowBlock * kKeyChunk], second[kRowBlock * kKeyChunk];
  for (int64_t t = first; t < last; t += kKeyChunk) {
    int64_t keys = smaller(kKeyChunk, last - t);
    dots(query, query_stride, count, kv.data[0] + t * kv.stride[0], kv.stride[0], keys, kv.size[0], scores, kKeyChunk);
    if (kv.parts == 2) {
      dots(query + padded(kv.size[0]), query_stride, count, kv.data[1] + t * kv.stride[1], kv.stride[1], keys,
           kv.size[1], second, kKeyChunk);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < keys; ++i) scores[r * kKeyChunk + i] += second[r * kKeyChunk + i];
    }
    for (int64_t r = 0; r < count; ++r) {
      mask_scores(scores + r * kKeyChunk, visible[r], t, keys, scaling);
      soften(scores + r * kKeyChunk, keys, accumulated + r * room, kv.value_size, maxima[r], totals[r]);
    }
    outer(scores, kKeyChunk, count, kv.value + t * kv.value_stride, kv.value_stride, keys, kv.value_size, accumulated,
          room);
  }
}

// Partial results of every (group, row) over `splits` ranges of keys.
struct Partials {
  int64_t splits, room;
  float *accumulated, *maxima, *totals;

  float* row(int64_t index) const { return accumulated + index * room; }
};

// Merges the splits of one row into out[size]; a row that saw nothing gives zeros.
static inline void merge(const Partials& p, int64_t row, int64_t size, float* out) {
  float largest = kMinusInfinity, total = 0;
  for (int64_t s = 0; s < p.splits; ++s) largest = std::fmax(largest, p.maxima[row * p.splits + s]);
  float pivot = largest == kMinusInfinity ? 0.0f : largest;
  for (int64_t s = 0; s < p.splits; ++s)
    total += p.totals[row * p.splits + s] * std::exp(p.maxima[row * p.splits + s] - pivot);
  std::memset(out, 0, size * sizeof(float));
  for (int64_t s = 0; s < p.splits; ++s) {
    float weight = std::exp(p.maxima[row * p.splits + s] - pivot) * (total == 0 ? 0.0f : 1.0f / total);
    const float* part = p.row(row * p.splits + s);
    for_each_vector(size, [&](int64_t i, int n) {
      store_count(out + i, fma(load_count(part + i, n), set1(weight), load_count(out + i, n)), n);
    });
  }
}

struct AttentionShape {
  int64_t groups, rows, keys, value_size;  // groups share keys: batch times key heads
  float scaling;
  int threads;
};

// keys(group) -> KeysAndValues<T>; query(group, row, float* target) packs; visible(group, row) -> Visible;
// write(group, row, const float* result) stores value_size floats.
// sink(group, row): a score that takes its share of the weights and gives no value; minus infinity: none.
template <typename Keys, typename Query, typename See, typename Write, typename Sink>
static inline void attend_all(const AttentionShape& shape, Keys keys, Query query, See visible, Write write, Sink sink) {
  static thread_local Scratch memory;
  int64_t blocks = divide_up(shape.rows, kRowBlock), items = shape.groups * blocks;
  if (items == 0) return;
  int64_t splits = 1;
  if (shape.threads > 1 && items < 2 * shape.threads)
    splits = smaller(divide_up(2 * shape.threads, items), divide_up(shape.keys, 4 * kKeyChunk));
  if (splits < 1) splits = 1;
  int64_t span = round_up(divide_up(shape.keys, splits), kKeyChunk), room = padded(shape.value_size);
  int64_t parts = shape.groups * shape.rows * splits;
  float* base = memory.get<float>(parts * (room + 2));
  Partials partials{splits, room, base, base + parts * room, base + parts * (room + 1)};
#pragma omp parallel for num_threads(shape.threads) if (shape.threads > 1) schedule(dynamic)
  for (int64_t item = 0; item < items * splits; ++item) {
    static thread_local Scratch packed;
    int64_t split = item % splits, block = item / splits % blocks, group = item / splits / blocks;
    int64_t row0 = block * kRowBlock, count = smaller(kRowBlock, shape.rows - row0);
    auto kv = keys(group);
    int64_t query_room = kv.query_room(), first = shape.keys, last = 0;
    float* q = packed.get<float>(count * (query_room + room));
    float* accumulated = q + count * query_room;
    std::memset(accumulated, 0, count * room * sizeof(float));
    Visible sees[kRowBlock];
    float maxima[kRowBlock], totals[kRowBlock];
    for (int64_t r = 0; r < count; ++r) {
      query(group, row0 + r, q + r * query_room);
      sees[r] = visible(group, row0 + r);
      first = smaller(first, sees[r].low);
      last = -smaller(-last, -sees[r].high);
      maxima[r] = split == 0 ? sink(group, row0 + r) : kMinusInfinity;
      totals[r] = maxima[r] == kMinusInfinity ? 0.0f : 1.0f;
    }
    first = -smaller(-first, -split * span), last = smaller(last, (split + 1) * span);
    attend(q, query_room, sees, count, kv, first, last, shape.scaling, accumulated, room, maxima, totals);
    for (int64_t r = 0; r < count; ++r) {
      int64_t part = (group * shape.rows + row0 + r) * splits + split;
      std::memcpy(partials.row(part), accumulated + r * room, shape.value_size * sizeof(float));
      partials.maxima[part] = maxima[r], partials.totals[part] = totals[r];
    }
  }
  std::vector<float> result(shape.value_size);
  for (int64_t row = 0; row < shape.groups * shape.rows; ++row) {
    merge(partials, row, shape.value_size, result.data());
    write(row / shape.rows, row % shape.rows, result.data());
  }
}

template <typename Keys, typename Query, typename See, typename Write>
static inline void attend_all(const AttentionShape& shape, Keys keys, Query query, See visible, Write write) {
  attend_all(shape, keys, query, visible, write, [](int64_t, int64_t) { return kMinusInfinity; });
}

}  // namespace porter
