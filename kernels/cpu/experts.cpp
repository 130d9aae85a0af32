// Routed experts: for every token and each of its top_k experts, down(silu(gate(x)) * up(x)) times the router's weight,
// summed in float32 and rounded once. Only the experts that were chosen are read. Tokens of one expert share its
// weights: up to four at a time straight from memory (decode), more through the blocked product (prefill).
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "rows.h"

namespace porter {
namespace {

constexpr int64_t kStrip = 64, kFew = 8;

// The (token, choice) pairs sorted by expert; pair p is token p / top_k.
// Expert numbers outside [0, E) belong to other devices and add nothing.
struct Routing {
  std::vector<int64_t> order, start;  // order[start[e] .. start[e + 1]) are the pairs of expert e
  struct Group {
    int64_t expert, first, count;
  };
  std::vector<Group> few;
  std::vector<int64_t> many;

  Routing(const int64_t* index, int64_t pairs, int64_t experts) : start(experts + 1, 0) {
    auto here = [&](int64_t p) { return index[p] >= 0 && index[p] < experts; };
    for (int64_t p = 0; p < pairs; ++p)
      if (here(p)) ++start[index[p] + 1];
    for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    order.resize(start[experts]);
    for (int64_t p = 0; p < pairs; ++p)
      if (here(p)) order[next[index[p]]++] = p;
    for (int64_t e = 0; e < experts; ++e) {
      if (start[e + 1] - start[e] > kFew) many.push_back(e);
      else
        for (int64_t i = start[e]; i < start[e + 1]; i += 4) few.push_back({e, i, smaller(4, start[e + 1] - i)});
    }
  }
};

// Rows of float32 activations times float or int8 weights.
template <typename Dot, typename W>
struct FloatRows {
  const float* rows;
  int64_t room, size, rows_per_token;  // row of pair p: p / rows_per_token

  const float* row(int64_t pair) const { return rows + pair / rows_per_token * room; }

  void few(const int64_t* pairs, int64_t count, const W* w, int64_t n, float* sums, const float* scale) const {
    static thread_local Scratch gathered;
    const float* x = row(pairs[0]);
    if (count > 1) {
      float* copy = gathered.get<float>(count * room);
      for (int64_t i = 0; i < count; ++i) std::memcpy(copy + i * room, row(pairs[i]), room * sizeof(float));
      x = copy;
    }
    dots(x, room, count, w, size, n, size, sums, kStrip);
    if (scale == nullptr) return;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < n; ++j) sums[i * kStrip + j] *= scale[j];
  }
  template <typename Write>
  void many(const int64_t* pairs, int64_t count, const W* w, int64_t n, const float* scale, int threads,
            Write write) const {
    gemm<Dot>(
        count, n, size, threads, [&](int64_t m) { return row(pairs[m]); }, [&](int64_t r) { return w + r * size; },
        [&](int64_t m, int64_t n0, int64_t n1, const float* sums) {
          float* target = write(pairs[m]) + n0;
          for (int64_t j = 0; j < n1 - n0; ++j) target[j] = scale == nullptr ? sums[j] : sums[j] * scale[n0 + j];
        });
  }
};

// Rows quantized per token times int8 weights, exactly.
struct Int8Rows {
  const int8_t* codes;
  const float* scales;
  int64_t size, rows_per_token;

  void few(const int64_t* pairs, int64_t count, const int8_t* w, int64_t n, float* sums, const float* scale) const {
    static thread_local Scratch packed;
    int64_t room = padded_int8(size);
    auto* x = packed.get<Int8Dot::Activation>(4 * room);
    int32_t totals[4 * kStrip];
    for (int64_t i = 0; i < count; ++i) pack_int8_row(x + i * room, codes + pairs[i] / rows_per_token * size, size);
    int8_dots(x, room, count, w, size, n, size, totals, kStrip);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < n; ++j)
        sums[i * kStrip + j] = static_cast<float>(totals[i * kStrip + j]) * scales[pairs[i] / rows_per_token] * scale[j];
  }
  template <typename Write>
  void many(const int64_t* pairs, int64_t count, const int8_t* w, int64_t n, const float* scale, int threads,
            Write write) const {
    gemm<Int8Gemm>(
        count, n, size, threads, [&](int64_t m) { return codes + pairs[m] / rows_per_token * size; },
        [&](int64_t r) { return w + r * size; },
        [&](int64_t m, int64_t n0, int64_t n1, const int32_t* sums) {
          float* target = write(pairs[m]) + n0;
          float x_scale = scales[pairs[m] / rows_per_token];
          for (int64_t j = 0; j < n1 - n0; ++j) target[j] = static_cast<float>(sums[j]) * x_scale * scale[n0 + j];
        });
  }
};

// y[pair] = weight[expert of pair] . rows[pair] for every pair; weight [E, n, k], scale [E, n] or null.
template <typename Rows, typename W>
void project(const Routing& routing, const Rows& rows, const W* weight, const float* scale, int64_t n, float* y,
             int threads) {
  int64_t strips = divide_up(n, kStrip), items = static_cast<int64_t>(routing.few.size()) * strips;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t item = 0; item < items; ++item) {
    const Routing::Group& group = routing.few[item / strips];
    const int64_t* pairs = routing.order.data() + group.first;
    int64_t n0 = item % strips * kStrip, count = smaller(kStrip, n - n0), row = group.expert * n + n0;
    float sums[4 * kStrip];
    rows.few(pairs, group.count, weight + row * rows.size, count, sums, scale == nullptr ? nullptr : scale + row);
    for (int64_t i = 0; i < group.count; ++i)
      std::memcpy(y + pairs[i] * n + n0, sums + i * kStrip, count * sizeof(float));
  }
  for (int64_t e : routing.many) {
    int64_t first = routing.start[e];
    rows.many(routing.order.data() + first, routing.start[e + 1] - first, weight + e * n * rows.size, n,
              scale == nullptr ? nullptr : scale + e * n, threads, [&](int64_t pair) { return y + pair * n; });
  }
}

struct Experts {
  int64_t tokens, hidden, intermediate, experts, top_k, hidden_stride;
  int threads;
  float limit;
};

struct Buffers {
  Scratch x, gate_up, active, y, codes, scales;
};

// gate_up [pairs, 2I] -> active [pairs, room of I]; the gate clamped from above, up on both sides.
void activate(const float* gate_up, float* active, int64_t pairs, const Experts& a) {
  int64_t size = a.intermediate;
  Vec high = set1(a.limit), low = set1(-a.limit);
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1) schedule(static)
  for (int64_t p = 0; p < pairs; ++p) {
    const float* gate = gate_up + p * 2 * size;
    float* target = active + p * padded(size);
    for_each_vector(size, [&](int64_t i, int n) {
      Vec up = vmax(low, vmin(high, load_count(gate + size + i, n)));
      store(target + i, silu(vmin(high, load_count(gate + i, n))) * up);
    });
  }
}

Int8Rows quantize(const float* x, int64_t rows, int64_t size, int64_t rows_per_token, Buffers& buffers, int threads) {
  int8_t* codes = buffers.codes.get<int8_t>(rows * size);
  float* scales = buffers.scales.get<float>(rows);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t r = 0; r < rows; ++r) scales[r] = quantize_row(codes + r * size, x + r * padded(size), size);
  return {codes, scales, size, rows_per_token};
}

template <typename T, typename R>
void combine(T* out, const float* y, const int64_t* index, const R* weights, const Experts& a) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1 && a.tokens > 4) schedule(static)
  for (int64_t t = 0; t < a.tokens; ++t) {
    for_each_vector(a.hidden, [&](int64_t i, int n) {
      Vec total = zero();
      for (int64_t j = 0; j < a.top_k; ++j) {
        int64_t pair = t * a.top_k + j;
        if (index[pair] < 0 || index[pair] >= a.experts) continue;
        total = fma(set1(to_float(weights[pair])), load_count(y + pair * a.hidden + i, n), total);
      }
      store_count(out + t * a.hidden + i, total, n);
    });
  }
}

#if defined(PORTER_BFLOAT16_DOT)
template <typename T>
using InputDot = std::conditional_t<sizeof(T) == 2, BFloat16Dot, FloatDot>;
#else
template <typename T>
using InputDot = FloatDot;
#endif

// Returns y [pairs, hidden] in float32.
template <typename T, typename W>
const float* run(const Experts& a, const Routing& routing, const T* hidden, const W* gate_up,
                 const float* gate_up_scale, const W* down, const float* down_scale, bool quantize_activations,
                 Buffers& buffers) {
  int64_t pairs = a.tokens * a.top_k, room = padded(a.hidden), active_room = padded(a.intermediate);
  float* x = buffers.x.get<float>(a.tokens * room);
  for (int64_t t = 0; t < a.tokens; ++t) pack_row(x + t * room, hidden + t * a.hidden_stride, a.hidden);
  float* both = buffers.gate_up.get<float>(pairs * 2 * a.intermediate);
  float* active = buffers.active.get<float>(pairs * active_room);
  float* y = buffers.y.get<float>(pairs * a.hidden);
  if constexpr (std::is_same_v<W, int8_t>) {
    if (quantize_activations) {
      Int8Rows rows = quantize(x, a.tokens, a.hidden, a.top_k, buffers, a.threads);
      project(routing, rows, gate_up, gate_up_scale, 2 * a.intermediate, both, a.threads);
      activate(both, active, pairs, a);
      rows = quantize(active, pairs, a.intermediate, 1, buffers, a.threads);
      project(routing, rows, down, down_scale, a.hidden, y, a.threads);
      return y;
    }
  }
  FloatRows<InputDot<T>, W> inputs{x, room, a.hidden, a.top_k};
  project(routing, inputs, gate_up, gate_up_scale, 2 * a.intermediate, both, a.threads);
  activate(both, active, pairs, a);
  FloatRows<FloatDot, W> activated{active, active_room, a.intermediate, 1};
  project(routing, activated, down, down_scale, a.hidden, y, a.threads);
  return y;
}

// shape: T, H, I, E, top_k, stride of hidden rows. index [T, top_k] int64, weights [T, top_k] of router_dtype, gate_up
// [E, 2I, H], down [E, H, I] and out [T, H] contiguous; scales [E, 2I] and [E, H], or null for float weights.
// limit: infinity for none.
void routed_experts(void* out, const void* hidden, const int64_t* index, const void* weights, const void* gate_up,
                    const float* gate_up_scale, const void* down, const float* down_scale, const int64_t* shape,
                    double limit, int32_t quantize_activations, int32_t dtype, int32_t router_dtype,
                    int32_t weight_dtype, int32_t threads) {
  Experts a{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], threads, static_cast<float>(limit)};
  static thread_local Buffers buffers;
  Routing routing(index, a.tokens * a.top_k, a.experts);
  dispatch(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(hidden);
    auto go = [&](auto weight_tag) {
      using W = decltype(weight_tag);
      return run(a, routing, x, static_cast<const W*>(gate_up), gate_up_scale, static_cast<const W*>(down), down_scale,
                 quantize_activations != 0, buffers);
    };
    const float* y = weight_dtype == kInt8 ? go(int8_t{}) : weight_dtype == kBFloat16 ? go(bf16{}) : go(T{});
    dispatch(router_dtype, [&](auto router_tag) {
      combine(static_cast<T*>(out), y, index, static_cast<const decltype(router_tag)*>(weights), a);
    });
  });
}

}  // namespace
}  // namespace porter

PORTER_EXPORT void porter_experts(void* out, const void* hidden, const int64_t* index, const void* weights,
                                  const void* gate_up, const float* gate_up_scale, const void* down,
                                  const float* down_scale, const int64_t* shape, int32_t quantize_activations,
                                  int32_t dtype, int32_t router_dtype, int32_t weight_dtype, int32_t threads) {
  porter::routed_experts(out, hidden, index, weights, gate_up, gate_up_scale, down, down_scale, shape,
                         std::numeric_limits<double>::infinity(), quantize_activations, dtype, router_dtype,
                         weight_dtype, threads);
}

PORTER_EXPORT void porter_clamped_experts(void* out, const void* hidden, const int64_t* index, const void* weights,
                                          const void* gate_up, const float* gate_up_scale, const void* down,
                                          const float* down_scale, const int64_t* shape, double limit,
                                          int32_t quantize_activations, int32_t dtype, int32_t router_dtype,
                                          int32_t weight_dtype, int32_t threads) {
  porter::routed_experts(out, hidden, index, weights, gate_up, gate_up_scale, down, down_scale, shape, limit,
                         quantize_activations, dtype, router_dtype, weight_dtype, threads);
}
